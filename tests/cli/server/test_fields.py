"""What a request may say, and what the server makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tpuport.cli.asked.settings import Settings
from tpuport.cli.server.fields import Limits, Shape, Wanted, of_text, plain, understood
from tpuport.cli.server.messages import Refused
from tpuport.core.layers.text_and_video import refuse_kwargs

SHAPES = (
    Shape(96, 64, 9, fps=8.0, state="ready"),
    Shape(96, 64, 17, fps=8.0, state="ready"),
    Shape(64, 64, 9, fps=8.0, state="compiling"),
)
LORAS = {"clay": Path("/loras/clay.safetensors")}


def asked(*, shapes: Sequence[Shape] = SHAPES, **given: Any) -> Wanted:
    return understood(
        {"prompt": "a fox", **given},
        model="wan",
        shapes=shapes,
        limits=Limits(steps=50, loras=LORAS),
        below=Settings(seed=(5,), options={"max_sequence_length": 16}),
    )


@pytest.mark.parametrize(
    ("given", "param", "said"),
    [
        ({"num_inference_stepz": 3}, "num_inference_stepz", "num_inference_steps?"),
        ({"prompt": " "}, "prompt", "is missing"),
        ({"prompt": 3}, "prompt", "is not text"),
        ({"prompt": "x" * 20_001}, "prompt", "characters"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        ({"model": "sora-2"}, "model", "this server has wan"),
        ({"size": "32x32"}, "size", "96x64 9 frames"),
        ({"size": "64x64"}, "size", "is not ready"),
        ({"size": "1" * 5000 + "x1"}, "size", ""),
        ({"num_frames": 10}, "num_frames", "96x64 17 frames"),
        ({"num_frames": 10**400}, "num_frames", "ready"),
        ({"seconds": 9}, "seconds", "9 seconds are not ready"),
        ({"seconds": 1, "num_frames": 9}, "seconds", "exclude"),
        ({"n": 9}, "n", "more than 8"),
        ({"num_inference_steps": 51}, "num_inference_steps", "more than 50"),
        ({"num_inference_steps": 51}, "num_inference_steps", "larger --max-steps"),
        ({"extra": {"sigmas": [1.0] * 51}}, "extra", "larger --max-steps"),
        ({"guidance_scale": float("nan")}, "guidance_scale", "finite"),
        ({"guidance_scale": 10**400}, "guidance_scale", "too large"),
        ({"fps": -1}, "fps", "not positive"),
        ({"seed": -1}, "seed", "negative"),
        ({"seed": 2**63}, "seed", "more than"),
        ({"lora": "cla"}, "lora", "did you mean clay?"),
        ({"lora": "/etc/passwd"}, "lora", "not here"),
        ({"lora": "clay:much"}, "lora", "no scale"),
        ({"extra": {"max_sequence_length": 512}}, "extra", "not for a request"),
        ({"extra": {"image": "x"}}, "extra", "not for a request"),
        ({"extra": {"a": {"b": ["/etc/passwd"]}}}, "extra", "may name a file"),
        ({"extra": {"a": "pyproject.toml"}}, "extra", "may name a file"),
        ({"extra": 3}, "extra", ""),
        ({"extra": {"a": "!!pairs [b: 1e308]"}}, "extra", "is no text, number"),
        ({"extra": {"a": "!!set {b}"}}, "extra", "is no text, number"),
        ({"guidance_scale": 1e308}, "guidance_scale", "more than 1000"),
        ({"guidance_scale": -1e308}, "guidance_scale", "less than -1000"),
        ({"flow_shift": 1e308}, "flow_shift", "more than 1000"),
        ({"fps": 1e-300}, "fps", "less than 0.1"),
        ({"extra": {"guidance_scale": 3}}, "extra", "beside extra"),
        ({"extra": {"num_inference_steps": 10**6}}, "extra", "beside extra"),
        ({"extra": {"pyramid_num_inference_steps_list": 9}}, "extra", "leave it out"),
        ({"extra": {"segment_frame_length": 9}}, "extra", "leave it out"),
        ({"extra": {"a": {"b": [1.0, -1e308]}}}, "extra", "within 10000 of 0"),
        ({"extra": {"a": "1e308"}}, "extra", "within 10000 of 0"),
        ({"extra": {"a": "[9.9e+300]"}}, "extra", "within 10000 of 0"),
        ({"extra": {"a": "nan"}}, "extra", "within 10000 of 0"),
        ({"extra": {"a": "&a [*a]"}}, "extra", "more than 10000 values"),
        ({"extra": {"a": [0] * 10_001}}, "extra", "more than 10000 values"),
        ({"extra": {"a": "a: b: c"}}, "extra", "no YAML"),
        ({"extra": {"timesteps": [9] * 51}}, "extra", "more than 50"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    given: dict[str, Any], param: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])  # where there is a pyproject.toml
    with pytest.raises(Refused) as caught:
        asked(**given)
    assert (caught.value.status, caught.value.param) == (400, param)
    assert said in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [
        (
            "DDIMScheduler:num_train_timesteps=100000000",
            "may say flow_shift, shift, timestep_spacing",
        ),
        ("ddim:shift=3,trained_betas=[0.1]", "is not for a request"),
        ("checkpoint:", "is not for a request"),
        ("ddim:use_karras_sigma=true", "use_karras_sigmas"),
        ("checkpoint:flow_shift=1e308", "above 0 and up to 1000"),
        ("checkpoint:shift=0", "above 0 and up to 1000"),
        ("ddim:prediction_type=zz", "none of epsilon, sample"),
        ("unipc:solver_order=1000000", "none of 1, 2, 3"),
        (3, "is no text"),
    ],
)
def test_a_scheduler_takes_values_that_are_harmless_alone(
    scheduler: Any, said: str
) -> None:
    """A table of 100,000,000 time steps takes gigabytes in each process."""
    with pytest.raises(Refused) as caught:
        asked(extra={"scheduler": scheduler})
    assert (caught.value.status, caught.value.param) == (400, "extra")
    assert said in caught.value.message
    for taken in ("ddim", "unipc:flow_shift=3.5, use_karras_sigmas=true"):
        values = asked(extra={"scheduler": taken}).values
        assert values["option"]["scheduler"] == taken


def test_a_request_becomes_values_of_settings() -> None:
    found = asked(seconds="2", n=2, flow_shift=3, lora="clay:0.8", guidance_scale=2)
    assert found.shape is SHAPES[1]  # 17 frames at 8 a second: 2.125 seconds
    assert found.seeds == [5, 6]
    assert found.values == {
        "prompt": "a fox",
        "guidance_scale": 2.0,
        "size": "96x64",
        "num_frames": 17,
        "lora": ["/loras/clay.safetensors:0.8"],
        "option": {
            "max_sequence_length": 16,
            "scheduler": "checkpoint:flow_shift=3.0",
        },
    }
    assert found.fields["seed"] == 5
    assert {"size": "96x64", "num_frames": 17}.items() <= found.fields.items()
    assert "seconds" not in found.fields  # other shapes may be nearer later
    again = dict(found.fields)
    assert asked(**again).values == found.values


def test_the_frames_that_were_made_say_how_long_a_shape_is() -> None:
    """CogVideoX makes 8 frames where 5 are asked for."""
    shapes = [Shape(32, 16, 5, 8.0, "ready", frames=8), Shape(32, 16, 9, 8.0, "ready")]
    assert [shape.as_dict()["seconds"] for shape in shapes] == ["1", "1.125"]
    assert asked(shapes=shapes, seconds=1).shape is shapes[0]


def test_a_form_has_numbers_as_text() -> None:
    given = {"prompt": "7", "seed": "7", "extra": '{"a": 1}', "lora": ["clay"]}
    typed = {"prompt": "7", "seed": 7, "extra": {"a": 1}, "lora": ["clay"]}
    assert of_text(given) == typed
    with pytest.raises(Refused) as caught:
        of_text({"seed": "seven"})
    assert "seed: 'seven' is not a number" in caught.value.message


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("--steps 2: at least 3", "num_inference_steps 2: at least 3"),
        (
            "--num-frames: takes none; add --image FILE",
            "num_frames: takes none; add input_reference FILE",
        ),
        ("--mesh tp=3: no", "the server's --mesh tp=3: no"),
        (
            "a -- b, x--y and 1/2 of https://a/b/c",
            "a -- b, x--y and 1/2 of https://a/b/c",
        ),
        ("no such file: '/srv/jobs/video_1/x.png'", "no such file: 'x.png'"),
    ],
)
def test_an_error_of_a_run_is_told_in_words_of_a_request(said: str, told: str) -> None:
    assert plain(said) == told


def test_what_the_blocks_of_the_server_take_is_the_servers() -> None:
    with pytest.raises(NotImplementedError) as caught:
        refuse_kwargs({"scale": 1})
    told = plain(str(caught.value))
    assert told.endswith("a server that is started with --blocks upstream takes this")
