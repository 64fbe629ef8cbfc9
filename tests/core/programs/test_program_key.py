"""The key of a program: what is in it, and what a difference reads like."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import pytest

import tpuport
from tests.core.spec.toys import installed_toy
from tpuport.core import compat
from tpuport.core.programs import program_key as program_keys
from tpuport.core.programs.lowering import Traceable
from tpuport.core.programs.program_key import ProgramKey, host_name, program_key

KEY = ProgramKey(
    model="toy",
    form="",
    stage="denoise",
    program="step",
    component="transformer",
    options={"dtype": "float32", "attention": "auto", "step_cache": "none"},
    config={"layers": 2},
    weights={"a.weight": "float32[4, 4]", "b.weight": "float32[4] split ('tp',)"},
    arguments={
        "['carry']['latents']": "float32[1, 13, 16]",
        "['inputs']['t']": "float32[]",
    },
    structure="*",
    platform="cpu",
    chip="cpu",
    compiler="XLA 1",
    mesh={"dp": 1, "tp": 1},
    devices=("0 of process 0",),
    host="a processor",
    source={"tpuport": "aa", "toy": "bb"},
    versions={"jax": "0.10.2"},
    flags=("--xla_a=1",),
    settings={"jax_enable_x64": False},
    context={"num_frames": 49, "num_inference_steps": 50},
)

#: A change of every field, and how the difference reads.
CHANGES: dict[str, tuple[Any, str]] = {
    "model": ("other", "model toy -> other"),
    "form": ("big", "form none -> big"),
    "stage": ("decode", "stage denoise -> decode"),
    "program": ("next", "program step -> next"),
    "component": ("vae", "component transformer -> vae"),
    "options": (
        {**KEY.options, "step_cache": "deepcache"},
        "step cache none -> deepcache",
    ),
    "config": ({"layers": 3}, "transformer layers 2 -> 3"),
    "weights": (
        {**KEY.weights, "a.weight": "bfloat16[4, 4]"},
        "a.weight float32[4, 4] -> bfloat16[4, 4]",
    ),
    "arguments": (
        {**KEY.arguments, "['carry']['latents']": "float32[1, 21, 16]"},
        "carry.latents float32[1, 13, 16] -> float32[1, 21, 16]",
    ),
    "structure": ("(*,)", "the nesting of its arguments changed"),
    "platform": ("tpu", "platform cpu -> tpu"),
    "chip": ("TPU v6 lite", "chip cpu -> TPU v6 lite"),
    "compiler": ("XLA 2", "compiler XLA 1 -> XLA 2"),
    "mesh": ({"dp": 2, "tp": 1}, "mesh dp=1,tp=1 -> dp=2,tp=1"),
    "devices": (
        ("1 of process 0",),
        'devices ["0 of process 0"] -> ["1 of process 0"]',
    ),
    "host": ("another", "processor a processor -> another"),
    "source": ({"tpuport": "aa", "toy": "cc"}, "toy source changed"),
    "versions": ({"jax": "0.11.0"}, "jax 0.10.2 -> 0.11.0"),
    "flags": (("--xla_b=1",), "compiler flag --xla_a=1 is not set now"),
    "settings": ({"jax_enable_x64": True}, "jax_enable_x64 false -> true"),
    "version": (0, "key version 1 -> 0"),
}


def test_every_field_has_its_change() -> None:
    assert {f.name for f in fields(ProgramKey)} == {*CHANGES, "context"}


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_is_part_of_the_identity_and_has_its_words(name: str) -> None:
    value, words = CHANGES[name]
    changed = replace(KEY, **{name: value})
    assert changed.digest != KEY.digest
    assert words in changed.difference(KEY)
    assert KEY.difference(KEY) == ()


def test_a_request_explains_a_difference_and_makes_none() -> None:
    longer = replace(KEY, context={"num_frames": 81, "num_inference_steps": 20})
    assert longer.digest == KEY.digest
    assert longer.difference(KEY) == ()
    arguments, words = CHANGES["arguments"]
    # Frames first, as the user set them; steps make no array of another shape.
    assert replace(longer, arguments=arguments).difference(KEY) == (
        "frames 49 -> 81",
        words,
    )


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((6.0, True), (1.0, False), ["guidance 6.0 -> 1.0"]),
        ((6.0, True), (7.0, True), []),
    ],
    ids=["turned off", "another scale"],
)
def test_guidance_explains_a_difference_where_it_comes_or_goes(
    before: tuple[float, bool], after: tuple[float, bool], told: list[str]
) -> None:
    keys = []
    for (scale, guided), rows in ((before, 2), (after, 1)):
        context = {"num_frames": 49, "guidance_scale": scale, "guided": guided}
        arguments = {"['carry']": f"float32[{rows}, 16]"}
        keys.append(replace(KEY, context=context, arguments=arguments))
    found = keys[1].difference(keys[0])
    assert found == (*told, "carry float32[2, 16] -> float32[1, 16]")


def test_many_arrays_are_counted() -> None:
    weights = {f"w{i}": "float32[2]" for i in range(40)}
    before = replace(KEY, weights=weights)
    after = replace(KEY, weights=dict.fromkeys(weights, "bfloat16[2]"))
    found = after.difference(before)
    assert found[0] == "w0 float32[2] -> bfloat16[2]"
    assert found[-1] == "37 more weights"
    assert len(found) == 4


def test_it_goes_through_json() -> None:
    read = ProgramKey.from_dict(json.loads(json.dumps(KEY.as_dict())), "x")
    assert read == KEY
    assert read.digest == KEY.digest
    with pytest.raises(ValueError, match="key version 0"):
        ProgramKey.from_dict({**KEY.as_dict(), "version": 0}, "x")


def test_the_key_of_a_program_needs_no_tracing(cache_dir: Path) -> None:
    traced = []

    def count(event: str, duration: float, **kwargs: Any) -> None:
        if "trace" in event or "compile" in event:
            traced.append(event)

    with (
        installed_toy(),
        tpuport.load("toy", mesh="dp=2,tp=4", cache_dir=cache_dir) as session,
    ):
        request = session.request(prompt=["a cat", "a dog"])
        loaded = session.components.load("transformer")
        program = session.port.stage("denoise").programs["step"]
        replicated = loaded.replicated
        args = (
            jax.ShapeDtypeStruct((2, 5, 8, 8, 8), "float32", sharding=replicated),
            jax.ShapeDtypeStruct((2, 8, 16), "float32", sharding=replicated),
            {"size": jax.ShapeDtypeStruct((), "float32", sharding=replicated)},
        )
        jax.monitoring.register_event_duration_secs_listener(count)
        try:
            asked = Traceable(
                stage="denoise", name="step", program=program, loaded=loaded, args=args
            )
            key = program_key(session.components, asked, request)
        finally:
            jax.monitoring.unregister_event_duration_listener(count)
        abstract = program_key(
            session.components,
            replace(asked, loaded=session.components.abstract("transformer")),
            request,
        )
    assert traced == []
    # The weights on the devices and those that are only described are one program's.
    assert abstract.difference(key) == ()
    assert abstract.digest == key.digest
    assert key.mesh == {"dp": 2, "sp": 1, "tp": 4}
    assert len(key.devices) == 8
    assert key.weights["to_q.weight"].endswith("split ('tp',)")
    assert key.arguments["['carry']"] == "float32[2, 5, 8, 8, 8]"
    assert set(key.source) == {"tpuport", "toy_stages", "toy_upstream"}
    assert {"python", "jax", "jaxlib", "torch", "torchax"} <= set(key.versions)
    assert key.host == host_name()


def test_compiler_flags_are_told_without_the_ones_that_only_dump(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "XLA_FLAGS",
        "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=8 --xla_b=2",
    )
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=1")
    assert compat.compiler_flags() == ("--xla_a=1", "--xla_b=2")


def test_the_source_hash_sees_every_file_of_a_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "hashed_package"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "deep" / "table.json").write_text("1")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("hashed_package")

    def found() -> str:
        program_keys.source_hash.cache_clear()
        return program_keys.source_hash("hashed_package")

    first = found()
    (package / "__pycache__").mkdir(exist_ok=True)
    (package / "__pycache__" / "x.pyc").write_text("other")
    assert found() == first
    (package / "deep" / "table.json").write_text("2")
    second = found()
    assert second != first
    (package / "deep" / "table.json").rename(package / "deep" / "renamed.json")
    assert found() not in (first, second)
    program_keys.source_hash.cache_clear()
