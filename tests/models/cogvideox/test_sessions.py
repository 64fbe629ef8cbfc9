"""Sessions beside and after one another, and what they leave behind."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from diffusers import CogVideoXPipeline
from diffusers.models.autoencoders import autoencoder_kl_cogvideox as vae_module
from diffusers.models.embeddings import CogVideoXPatchEmbed
from torch.nn.functional import scaled_dot_product_attention as sdpa

import tpuport
from tests.tolerances import TOLERANCES
from tpuport.core import compat
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.run import executor
from tpuport.core.spec import requests
from tpuport.core.spec.tiling import DoesNotFitError
from tpuport.errors import ArtifactError, UsageError, VideoError, WeightsError

SHAPE = {"height": 48, "width": 64, "num_frames": 9, "num_inference_steps": 2}


@pytest.fixture
def load(checkpoints: Callable[[str], Path], cache: Path) -> Callable[..., Any]:
    def open_session(form: str, **kwargs: Any) -> Any:
        return tpuport.load(weights=checkpoints(form), cache_dir=cache, **kwargs)

    return open_session


def test_two_sessions_of_two_variants_do_not_see_each_other(load: Any) -> None:
    with load("2b") as session:
        alone = session.generate("a fox", **SHAPE)
    with load("5b") as other:
        other.generate("a fox", **SHAPE)
    with load("2b") as session, load("1.5-5b") as other:
        other.generate("a fox", **SHAPE)
        again = session.generate("a fox", **SHAPE)
        other.generate("a fox", **SHAPE)
    assert np.array_equal(alone.frames, again.frames)


def _torch_state() -> list[Any]:
    torchax = compat.import_torchax()
    return [
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.nn.functional.scaled_dot_product_attention is sdpa,
        vae_module.CogVideoXCausalConv3d.forward,
        vae_module.CogVideoXSpatialNorm3D.forward,
        CogVideoXPatchEmbed._get_positional_embeddings,
        dict(torchax.default_env()._ops),
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_default_matmul_precision,
        jax.config.jax_enable_x64,
        list(warnings.filters),
    ]


def test_torch_diffusers_and_jax_are_as_before(
    load: Any, checkpoints: Callable[[str], Path]
) -> None:
    def upstream() -> Any:
        pipe = CogVideoXPipeline.from_pretrained(checkpoints("2b"))
        pipe.set_progress_bar_config(disable=True)
        return pipe(
            "a fox",
            **SHAPE,
            generator=torch.Generator().manual_seed(0),
            max_sequence_length=20,
            output_type="np",
        ).frames

    before, frames = _torch_state(), upstream()
    with load("2b") as session:
        session.generate("a fox", **SHAPE)
        # Also beside an open session.
        assert np.array_equal(upstream(), frames)
        assert _torch_state() == before
        with pytest.raises(UsageError):
            session.generate("a fox", **{**SHAPE, "num_frames": 10})
    assert _torch_state() == before
    assert np.array_equal(upstream(), frames)


def test_each_stage_loads_only_its_own_components(
    checkpoints: Callable[[str], Path], cache: Path, tmp_path: Path
) -> None:
    whole = checkpoints("5b")
    run_dir = tmp_path / "run"
    opts: dict[str, Any] = {"cache_dir": cache, "keep_loaded": False}
    with tpuport.load(weights=whole, **opts) as session:
        request = session.request(prompt="a fox", **SHAPE)
        run = session.open_run(run_dir, request)
        session.run_stage_in(run, "encode")
        assert not session.components.loaded
        expected = session.generate("a fox", **SHAPE)
    # The run directory goes to a machine that has no text encoder and no VAE weights.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(run_dir, elsewhere)
    part = tmp_path / "part"
    shutil.copytree(whole, part)
    shutil.rmtree(part / "text_encoder")
    shutil.rmtree(part / "tokenizer")
    (part / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with tpuport.load(weights=part, variant="5b", **opts) as session:
        run = RunDirectory.open(elsewhere)
        # The variant is recorded as it was detected.
        assert run.variant == "custom"
    with tpuport.load(weights=part, **opts) as session:
        session.run_stage_in(run, "denoise")
    with tpuport.load(weights=whole, **opts) as session:
        made, _ = session.run_stage_in(run, "decode")
    assert np.array_equal(made["frames"], expected.frames)


def test_other_weights_are_refused_by_name(
    checkpoints: Callable[[str], Path], cache: Path, tmp_path: Path
) -> None:
    from tests.models.conftest import write_checkpoint

    with tpuport.load(weights=checkpoints("5b"), cache_dir=cache) as session:
        run = session.open_run(
            tmp_path / "run", session.request(prompt="a fox", **SHAPE)
        )
        session.run_stage_in(run, "encode")
    other = write_checkpoint(tmp_path / "other", "5b", "CogVideoXDPMScheduler", seed=1)
    with (
        tpuport.load(weights=other, cache_dir=cache) as session,
        pytest.raises(ArtifactError, match="other weights for transformer"),
    ):
        session.run_stage_in(run, "denoise")


def test_bfloat16_embeddings_stay_bfloat16_and_latents_float32(
    load: Any, tmp_path: Path
) -> None:
    with load("2b", dtype="bfloat16") as session:
        run = session.open_run(
            tmp_path / "run", session.request(prompt="a fox", **SHAPE)
        )
        made, _ = session.run_stage_in(run, "encode")
        assert made["prompt_embeds"].dtype == torch.bfloat16
        made, _ = session.run_stage_in(run, "denoise")
        assert made["latents"].dtype == torch.float32
        made, _ = session.run_stage_in(run, "decode")
        assert made["frames"].dtype == np.float32
    stages = json.loads((tmp_path / "run" / "run.json").read_text())["stages"]
    tensors = stages["encode"]["tensors"]
    assert tensors["prompt_embeds"]["dtype"] == "bfloat16"


def test_bfloat16_is_as_close_to_float32_as_upstreams(load: Any) -> None:
    with load("5b") as session:
        exact = session.generate("a fox", **SHAPE)
    embeds = torch.randn(1, 20, 32, generator=torch.Generator().manual_seed(0))
    given = {
        "prompt_embeds": embeds,
        "negative_prompt_embeds": -embeds,
        "latents": torch.randn(
            exact.latents.shape, generator=torch.Generator().manual_seed(1)
        ),
    }
    low = {k: v.to(torch.bfloat16) for k, v in given.items()}
    with load("2b") as session:
        truth = session.generate(
            **{k: v.float() for k, v in low.items()}, **SHAPE
        ).latents
    with load("2b", dtype="bfloat16") as session:
        ours = session.generate(**low, **SHAPE).latents
        theirs = session.generate(**low, **SHAPE, backend="diffusers").latents
    our_error = float((ours - truth).abs().mean())
    their_error = float((theirs - truth).abs().mean())
    # Both are rounded in the weights; the rest must not be worse than upstream's.
    assert our_error <= 1.05 * their_error


def test_text_encoder_on_the_host(load: Any) -> None:
    with load("5b") as session:
        on_device = session.generate("a fox", **SHAPE)
    with load("5b", encode_on="host") as session:
        on_host = session.generate("a fox", **SHAPE)
    assert on_host.report.stages[0].backend == "diffusers"
    difference = np.abs(on_host.frames - on_device.frames).max()
    assert difference <= TOLERANCES["video float32"]


def test_a_warm_start_compiles_nothing(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    for expected in (False, True):
        with tpuport.load(weights=checkpoints("2b"), cache_dir=tmp_path) as session:
            result = session.generate("a fox", **SHAPE)
        compiles = [c for s in result.report.stages for c in s.compiles]
        assert [c.program for c in compiles] == ["encode", "step", "first float32"]
        assert all(c.cached == expected for c in compiles)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_frames": 10}, "nearest valid: 9 or 17"),
        ({"height": 50}, "nearest valid: 48 or 64"),
        ({"width": 1}, "nearest valid: 16"),
        ({"num_inference_steps": 0}, "0 denoising steps"),
        ({"num_inference_steps": -2}, "-2 denoising steps"),
        ({"num_inference_steps": 1001}, "the schedule has 1000"),
        ({"seed": -1}, "seed -1"),
        ({"seed": [1, 2]}, "2 seeds for 1 videos"),
        ({"guidance_scale": float("nan")}, "not finite"),
        ({"scheduler": "euler"}, "choose one of checkpoint, ddim, dpm"),
        ({"colour": "blue"}, "has no option 'colour'"),
        ({"frames": 9}, "did you mean num_frames?"),
        ({"steps": 9}, "did you mean num_inference_steps?"),
        ({"schedler": "ddim"}, "did you mean scheduler?"),
        ({"output_type": "pil"}, "the result has frames and latents"),
        ({"generator": 1}, "give seed"),
        ({"size": "64x48"}, "give height and width"),
        # A keyword, and no flag.
        ({"image": np.zeros((48, 64, 3), np.uint8)}, r"from an image \(image\)"),
        ({"prompt_embeds": torch.zeros(1, 20, 32)}, "exclude each other"),
    ],
)
def test_a_request_off_its_rule(
    changes: dict[str, Any], message: str, load: Any
) -> None:
    with load("2b") as session, pytest.raises(UsageError, match=message):
        session.generate("a fox", **{**SHAPE, **changes})


def test_frames_of_each_variant(load: Any) -> None:
    with (
        load("1.5-5b", variant="1.5-5b") as session,
        pytest.raises(UsageError, match=r"16n.1 frames, up to 161; .*: 1 or 17"),
    ):
        session.generate("a fox", **SHAPE)
    with (
        load("2b", variant="2b") as session,
        pytest.raises(UsageError, match="up to 49; nearest valid: 49"),
    ):
        session.generate("a fox", **{**SHAPE, "num_frames": 57})


def test_a_variant_of_another_form_than_the_checkpoint(load: Any) -> None:
    with (
        load("2b", variant="5b") as session,
        pytest.raises(UsageError, match=r"not a 5b checkpoint: .*sin-cos"),
    ):
        session.generate("a fox", **SHAPE)


def test_weights_that_overflow_end_in_an_error(
    checkpoints: Callable[[str], Path], cache: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "large"
    shutil.copytree(checkpoints("2b"), folder)
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["proj_out.weight"][:] = 3e38
    save_file(weights, path, metadata={"format": "pt"})
    with (
        tpuport.load(weights=folder, cache_dir=cache) as session,
        pytest.raises(VideoError, match="not finite after step 1 of 2"),
    ):
        session.generate("a fox", **SHAPE)


def test_a_checkpoint_with_a_missing_tensor_is_refused_by_every_backend(
    checkpoints: Callable[[str], Path], cache: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "missing"
    shutil.copytree(checkpoints("2b"), folder)
    path = folder / "text_encoder" / "model.safetensors"
    weights = load_file(path)
    del weights["encoder.final_layer_norm.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    for backend in ("tpuport", "diffusers"):
        with (
            tpuport.load(weights=folder, cache_dir=cache) as session,
            pytest.raises(WeightsError, match=r"missing tensor encoder\.final_layer"),
        ):
            session.generate("a fox", **SHAPE, backend=backend)


def test_a_prompt_over_the_limit_is_cut_and_said(load: Any) -> None:
    from tpuport.core.reports import Reporter

    said: list[str] = []

    class Listener(Reporter):
        def say(self, text: str) -> None:
            said.append(text)

    with load("2b", reporter=Listener()) as session:
        request = session.request(prompt="a red fox and " * 20, **SHAPE)
        session.run_stage("encode", request, {})
    assert any("over the limit of 20" in t and "fox" in t for t in said)


@pytest.mark.parametrize("backend", ["tpuport", "diffusers"])
def test_a_checkpoint_without_its_vocabulary_is_refused(
    backend: str, checkpoints: Callable[[str], Path], cache: Path, tmp_path: Path
) -> None:
    # transformers would encode with special tokens alone and say nothing.
    folder = tmp_path / "mute"
    shutil.copytree(checkpoints("2b"), folder)
    (folder / "tokenizer" / "spiece.model").unlink()
    with (
        tpuport.load(weights=folder, cache_dir=cache) as session,
        pytest.raises(WeightsError, match=r"tokenizer/spiece\.model is missing"),
    ):
        session.generate("a fox", **SHAPE, backend=backend)


def test_every_component_is_checked_before_the_first_stage(
    checkpoints: Callable[[str], Path], cache: Path, tmp_path: Path
) -> None:
    from tpuport.core.reports import Reporter

    folder = tmp_path / "cut"
    shutil.copytree(checkpoints("2b"), folder)
    path = folder / "vae" / "diffusion_pytorch_model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    loaded: list[str] = []

    class Listener(Reporter):
        def loading(self, component: str) -> None:
            loaded.append(component)

    with tpuport.load(weights=folder, cache_dir=cache, reporter=Listener()) as session:
        with pytest.raises(WeightsError, match=r"vae/.* is truncated"):
            session.generate("a fox", **SHAPE)
        assert not loaded
        # A damaged component is not recorded, so that the run goes on once mended.
        request = session.request(prompt="a fox", **SHAPE)
        run = session.open_run(tmp_path / "run", request)
        assert run.weights["vae"] is None
        assert run.weights["transformer"]
        path.write_bytes(whole)
        for stage in ("encode", "denoise", "decode"):
            session.run_stage_in(run, stage)


def test_files_that_are_not_read_do_not_make_other_weights(
    checkpoints: Callable[[str], Path], cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "littered"
    shutil.copytree(checkpoints("2b"), folder)
    with tpuport.load(weights=folder, cache_dir=cache) as session:
        run = session.open_run(
            tmp_path / "run", session.request(prompt="a fox", **SHAPE)
        )
        session.run_stage_in(run, "encode")
    for name in ("README.md", ".DS_Store", "diffusion_pytorch_model.fp16.safetensors"):
        (folder / "transformer" / name).write_bytes(b"something")
    with tpuport.load(weights=folder, cache_dir=cache) as session:
        made, _ = session.run_stage_in(run, "denoise")
        assert torch.isfinite(made["latents"]).all()
        # A file that is read does count.
        config = folder / "transformer" / "config.json"
        config.write_text(config.read_text() + "\n")
    with (
        tpuport.load(weights=folder, cache_dir=cache) as session,
        pytest.raises(ArtifactError, match="other weights for transformer"),
    ):
        session.run_stage_in(run, "denoise")


def test_quantised_weights_are_refused(
    checkpoints: Callable[[str], Path], cache: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "int8"
    shutil.copytree(checkpoints("2b"), folder)
    path = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    weights = load_file(path)
    weights["proj_out.weight"] = weights["proj_out.weight"].to(torch.int8)
    save_file(weights, path, metadata={"format": "pt"})
    with (
        tpuport.load(weights=folder, cache_dir=cache) as session,
        pytest.raises(WeightsError, match=r"proj_out\.weight as I8"),
    ):
        session.generate("a fox", **SHAPE)


def test_a_short_negative_prompt_is_not_said_to_be_cut(load: Any) -> None:
    from tpuport.core.reports import Reporter

    said: list[str] = []

    class Listener(Reporter):
        def say(self, text: str) -> None:
            said.append(text)

    with load("2b", reporter=Listener()) as session:
        request = session.request(prompt="a red fox and " * 200, **SHAPE)
        session.run_stage("encode", request, {})
    (warning,) = [text for text in said if "over the limit of 20" in text]
    assert "<pad>" not in warning
    assert len(warning) < 400


def test_a_closed_session_says_so(load: Any) -> None:
    with load("2b") as session:
        pass
    with pytest.raises(UsageError, match="session is closed"):
        session.generate("a fox", **SHAPE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_inference_steps": 2.5}, "num_inference_steps 2.5 is not a whole"),
        ({"height": True}, "height True is not a whole"),
        ({"prompt": []}, "empty list"),
        ({"prompt": 3}, "prompt 3 is not a string"),
        ({"seed": "x"}, "seed 'x' is not a whole number"),
        ({"seed": 1.5}, "seed 1.5 is not a whole number"),
        ({"guidance_scale": "high"}, "not a number"),
        ({"fps": 0}, "must be from 0.000001"),
    ],
)
def test_values_of_another_type(
    changes: dict[str, Any], message: str, load: Any
) -> None:
    with load("2b") as session, pytest.raises(UsageError, match=message):
        session.generate(**{"prompt": "a fox", **SHAPE, **changes})


def test_latents_as_a_numpy_array(load: Any) -> None:
    noise = torch.randn(1, 3, 4, 6, 8, generator=torch.Generator().manual_seed(0))
    with load("2b") as session:
        tensor = session.generate("a fox", latents=noise, **SHAPE)
        array = session.generate("a fox", latents=noise.numpy(), **SHAPE)
        with pytest.raises(UsageError, match=r"needs \(1, 3, 4, 6, 8\)"):
            session.generate("a fox", latents=noise[:, :2], **SHAPE)
    assert np.array_equal(tensor.frames, array.frames)


def test_a_video_larger_than_the_machine_is_refused_with_what_fits(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load("5b") as session:
        request = session.request(prompt="a fox", **SHAPE)
        latents = math.prod(session.port.latent_shape(request, session.checkpoint))
        # Latents in float32, three times, and frames as bytes.
        room = latents * 4 * 3 + 3 * 9 * request.height * request.width

        def memory(*, total: bool) -> int | None:
            return room if total else 0  # what others have taken may be free later

        monkeypatch.setattr(requests, "host_memory", memory)
        session.request(prompt="a fox", **SHAPE)
        with pytest.raises(UsageError, match="at this size about 9 frames fit"):
            session.request(prompt="a fox", **{**SHAPE, "num_frames": 17})


def test_a_step_larger_than_a_device_is_refused_with_what_fits(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    embeds = dict.fromkeys(
        ("prompt_embeds", "negative_prompt_embeds"), torch.zeros(1, 20, 32)
    )
    with load("5b") as session:
        request = session.request(prompt="a fox", **SHAPE)
        monkeypatch.setattr(executor, "program_room", lambda _, held, own: own + 10**8)
        session.run_stage("denoise", request, embeds)
    with load("5b") as session:
        monkeypatch.setattr(executor, "program_room", lambda _, held, own: own + 50000)
        with pytest.raises(DoesNotFitError, match=r"step needs .*, or use more"):
            session.run_stage("denoise", request, embeds)
