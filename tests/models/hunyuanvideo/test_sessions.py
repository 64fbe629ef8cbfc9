"""Runs of HunyuanVideo: text buckets, step caching, stages on files, bare modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.models.hunyuanvideo.upstream import picture
from tests.models.hunyuanvideo.videos import changed
from tests.tolerances import TOLERANCES
from tpuport.core.files.quality import compare
from tpuport.core.files.sources import read_image
from tpuport.core.reports import Reporter
from tpuport.core.run.stage_calls import Timing
from tpuport.core.spec.stage_work import Work
from tpuport.errors import UsageError, WeightsError
from tpuport.models.hunyuanvideo import stages

ATOL = TOLERANCES["component float32"]
SHAPE = {"height": 48, "width": 64, "num_frames": 5}
SHORT = 'a fox says "hi"'
LONG = "a fox and a bear and a wolf " * 10

Load = Callable[..., Any]


@pytest.fixture(scope="module")
def load(
    hunyuanvideo_folders: dict[str, Path],
    cache_dir: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Load:
    # 1.5 makes small videos of images.
    small = tmp_path_factory.mktemp("changed") / "small"
    changed(hunyuanvideo_folders["1.5"], small, {"target_size": 64})
    folders = {"1.5": small, "13b": hunyuanvideo_folders["13b"]}

    def open_session(form: str = "1.5", **options: Any) -> Any:
        return tpuport.load(
            "hunyuanvideo", weights=folders[form], cache_dir=cache_dir, **options
        )

    return open_session


def programs(report: Any) -> list[str]:
    return [compiled.program for compiled in report.compiles]


def test_text_is_trimmed_and_a_bucket_is_one_program(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trimmed or with all 1000 tokens of padding, the result is the same."""
    with load() as session:
        first = session.request(prompt=SHORT, num_inference_steps=1, **SHAPE)
        embeds, _ = session.run_stage("encode", first, {})
        trimmed, report = session.run_stage("denoise", first, embeds)
        assert programs(report) == ["step"]
        joint = max(r["key"][2] for r in report.attention if r["key_lengths"])
        # 2 latent frames of 3 x 4, a bucket of 64 tokens of text and 32 to draw.
        assert joint == 24 + 64 + 32
        # Another prompt of the same buckets compiles nothing, a longer one does.
        again = session.request(
            prompt='a cat says "ho"', num_inference_steps=1, **SHAPE
        )
        other, _ = session.run_stage("encode", again, {})
        _, report = session.run_stage("denoise", again, other)
        assert programs(report) == []
        longer = session.request(prompt=LONG, num_inference_steps=1, **SHAPE)
        long_embeds, _ = session.run_stage("encode", longer, {})
        assert int(long_embeds["prompt_embeds_mask"].sum()) > 64
        _, report = session.run_stage("denoise", longer, long_embeds)
        assert programs(report) == ["step"]
    monkeypatch.setattr(stages, "TEXT_BUCKETS", ())
    monkeypatch.setattr(stages, "GLYPH_BUCKETS", ())
    with load() as session:
        padded, report = session.run_stage("denoise", first, embeds)
        joint = max(r["key"][2] for r in report.attention if r["key_lengths"])
        assert joint == 24 + 1000 + 256
    assert float((padded["latents"] - trimmed["latents"]).abs().max()) <= ATOL


def test_what_padding_holds_changes_nothing(load: Load) -> None:
    with load() as session:
        request = session.request(prompt=SHORT, num_inference_steps=1, **SHAPE)
        embeds, _ = session.run_stage("encode", request, {})
        plain, _ = session.run_stage("denoise", request, embeds)
        for name in ("prompt_embeds", "prompt_embeds_2", "negative_prompt_embeds"):
            mask = embeds[name.replace("embeds", "embeds_mask")].bool()
            embeds[name] = torch.where(
                mask[..., None], embeds[name], torch.tensor(1e4, dtype=torch.float32)
            )
        filled, _ = session.run_stage("denoise", request, embeds)
    assert torch.equal(plain["latents"], filled["latents"])


def test_guidance_in_one_batch_is_two_sequential_calls(load: Load) -> None:
    """The pair's prediction, from each prompt's own at a single step."""
    # Both have a text to draw: alone they are one program.
    negative = 'rain on "no"'

    def latents(session: Any, prompt: str, **guidance: Any) -> torch.Tensor:
        request = session.request(
            prompt=prompt, num_inference_steps=1, seed=3, **guidance, **SHAPE
        )
        embeds, _ = session.run_stage("encode", request, {})
        made, _ = session.run_stage("denoise", request, embeds)
        found: torch.Tensor = made["latents"]
        return found

    with load() as session:
        both = latents(session, SHORT, negative_prompt=negative, guidance_scale=4.0)
        cond = latents(session, SHORT, guidance_scale=1.0)
        uncond = latents(session, negative, guidance_scale=1.0)
    # One Euler step from the same noise: latents combine as the predictions do.
    expected = uncond + 4.0 * (cond - uncond)
    scale = float(expected.abs().max())
    assert float((both - expected).abs().max()) <= ATOL * scale


@pytest.mark.parametrize("form", ["1.5", "13b"])
def test_cached_steps_are_programs_compiled_before_the_first_step(
    form: str, load: Load
) -> None:
    steps = {"num_inference_steps": 20, "seed": 1, **SHAPE}
    with load(form) as session:
        exact = session.generate(SHORT, **steps)
        found = {}
        for cache in ("deepcache", "taylorseer"):
            text = f"{cache}:start=4,end=18,interval=2"
            made = session.generate(SHORT, step_cache=text, **steps)
            assert programs(made.report.stages[1]) == ["step_full", "step_cached"]
            # Compiled in warm-up: no step of the run waits for a compiler.
            assert made.report.stages[1].steady_calls == 19
            assert str(made.request.step_cache).startswith(text)
            found[cache] = compare(made.frames, exact.frames)
        after = session.generate(SHORT, **steps)
    assert all(40 < quality["psnr"] < 80 for quality in found.values())
    assert all(0.99 < quality["ssim"] < 1 for quality in found.values())
    if form == "13b":
        assert found["taylorseer"]["psnr"] > found["deepcache"]["psnr"]
    # An exact run after cached ones has the bits of the one before.
    assert np.array_equal(after.frames, exact.frames)
    assert torch.equal(after.latents, exact.latents)


def test_a_cache_that_does_not_fit_the_steps(load: Load) -> None:
    with load(variant="demo") as session:
        for cache, words in (
            ("deepcache:start=9", "must be 1 to 6"),
            ("taylorseer:order=9", "must be 1 to 4"),
            ("magic", "choose one of deepcache, taylorseer"),
            ("deepcache:interval=1", "must be at least 2"),
        ):
            with pytest.raises(UsageError, match=words):
                session.request(prompt="a", step_cache=cache)
        with pytest.raises(UsageError, match="would cache none of 2 steps"):
            session.request(prompt="a", step_cache="deepcache", num_inference_steps=2)


def test_three_stages_on_files_are_one_run_in_memory(
    load: Load, tmp_path: Path
) -> None:
    image = picture()
    asked = {"num_inference_steps": 2, "seed": 5, "num_frames": 5}
    with load() as session:
        whole = session.generate(SHORT, image=image, **asked)
        source = read_image(image)
        request = session.request(prompt=SHORT, source=source, **asked)
        assert request.as_dict() == whole.request.as_dict()
        run = session.open_run(tmp_path / "run", request)
        with pytest.raises(UsageError, match=r"starts from 1 source\(s\) \(i2v\)"):
            session.run_stage_in(run, "encode")
        with pytest.raises(UsageError, match="image is another than the run"):
            session.run_stage_in(run, "encode", source=read_image(picture(seed=9)))
        session.run_stage_in(run, "encode", source=source)
    for stage in ("denoise", "decode"):
        with load() as session:
            tensors, _ = session.run_stage_in(run, stage)
    assert np.array_equal(tensors["frames"], whole.frames)
    other = dataclasses.replace(request, sources=("0" * 64,))
    with (
        load() as session,
        pytest.raises(tpuport.errors.ArtifactError, match=r"settings\.sources"),
    ):
        session.open_run(tmp_path / "run", other)


def test_the_glyph_encoder_stays_float32(load: Load) -> None:
    with load(dtype="bfloat16") as session:
        request = session.request(prompt=SHORT, num_inference_steps=2, **SHAPE)
        embeds, report = session.run_stage("encode", request, {})
        assert embeds["prompt_embeds_2"].dtype == torch.float32
        assert embeds["prompt_embeds"].dtype == torch.bfloat16
        bytes_of = {p["component"]: p["total_bytes"] for p in report.sharding}
        latents, _ = session.run_stage("denoise", request, embeds)
    assert latents["latents"].dtype == torch.float32
    with load() as session:
        exact, plain = session.run_stage("encode", request, {})
    full = {p["component"]: p["total_bytes"] for p in plain.sharding}
    assert bytes_of["text_encoder_2"] == full["text_encoder_2"]
    assert bytes_of["text_encoder"] * 2 == full["text_encoder"]
    assert torch.equal(exact["prompt_embeds_2"], embeds["prompt_embeds_2"])


def test_encoding_on_the_host_is_the_same(load: Load) -> None:
    with load() as session, load(encode_on="host") as other:
        source = read_image(picture())
        request = session.request(prompt=SHORT, source=source, num_frames=5)
        pixels = {"image": source.for_videos(1)}
        ours, _ = session.run_stage("encode", request, pixels)
        theirs, report = other.run_stage("encode", request, pixels)
    assert report.backend == "diffusers"
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        error = (tensor.float() - theirs[name].float()).abs()
        if name.endswith("prompt_embeds"):
            mask = theirs[name.replace("embeds", "embeds_mask")].bool()
            error = error[mask]
        assert float(error.max()) <= ATOL, name


def test_names_of_older_files_and_names_that_are_not_upstreams(
    hunyuanvideo_folders: dict[str, Path], tmp_path: Path
) -> None:
    """Files say ``text_model.``, as published; transformers 5 does not."""
    import shutil

    from safetensors.torch import load_file, save_file

    folder = tmp_path / "checkpoint"
    shutil.copytree(hunyuanvideo_folders["13b"], folder)
    file = folder / "text_encoder_2" / "model.safetensors"
    stored = load_file(file)
    assert all(name.startswith("text_model.") for name in stored)
    stored["text_model.embeddings.position_ids"] = torch.arange(77)[None]
    save_file(stored, file)
    with tpuport.load("hunyuanvideo", weights=folder) as session:
        session.check_weights(["encode"])
    stored["text_model.more.weight"] = torch.zeros(1)
    save_file(stored, file)
    with (
        tpuport.load("hunyuanvideo", weights=folder) as session,
        pytest.raises(WeightsError, match=r"extra tensor text_model\.more\.weight"),
    ):
        session.check_weights(["encode"])


def test_what_has_no_effect_is_said(hunyuanvideo_folders: dict[str, Path]) -> None:
    said: list[str] = []

    class Listener(Reporter):
        def say(self, text: str) -> None:
            said.append(text)

    with tpuport.load(
        "hunyuanvideo",
        weights=hunyuanvideo_folders["13b"],
        variant="demo-13b",
        reporter=Listener(),
    ) as session:
        options = {"true_cfg_scale": 3}
        session.request(prompt="a", negative_prompt="blur", options=options)
        assert said == []
        session.request(prompt="a", negative_prompt="blur")
        assert len(said) == 1
        assert "negative prompt has no effect" in said[0]


@pytest.mark.parametrize("form", ["1.5", "1.5 of an image", "13b"])
def test_upstreams_denoise_stage_is_the_ports(form: str, load: Load) -> None:
    name, _, image = form.partition(" of an ")
    source = read_image(picture()) if image else None
    asked: dict[str, Any] = {"source": source, "num_frames": 5} if source else SHAPE
    with load(name) as session:
        request = session.request(prompt=SHORT, num_inference_steps=2, seed=3, **asked)
        pixels = {"image": source.for_videos(1)} if source else {}
        embeds, _ = session.run_stage("encode", request, pixels)
        ours, _ = session.run_stage("denoise", request, embeds)
        theirs, report = session.run_stage(
            "denoise", request, embeds, backend="diffusers"
        )
    assert report.backend == "diffusers"
    difference = (ours["latents"] - theirs["latents"]).abs().max()
    assert float(difference) <= TOLERANCES["video float32"]


def test_upstreams_code_has_no_step_cache(load: Load) -> None:
    with load() as session:
        request = session.request(prompt="a", step_cache="deepcache", **SHAPE)
        with pytest.raises(UsageError, match="is not upstream's"):
            session.run_stage("denoise", request, {}, backend="diffusers")


def test_without_a_cache_the_step_is_the_plugins_own(load: Load) -> None:
    """So the program has not a bit more in it than without step caching."""
    with load() as session:
        request = session.request(prompt="a", **SHAPE)
        stage = session.port.stage("denoise")
        work = Work(
            carry=None, constants=None, calls=[], total=0, finish=lambda c, o: {}
        )
        ran, same = session.executor._cached(stage, work, request, Timing())
    assert ran is stage
    assert same is work
