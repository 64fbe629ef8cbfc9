"""Whole videos from the seed alone, against upstream's pipelines as recorded."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from diffusers import AutoencoderKLHunyuanVideo15

import tpuport
from tests.models import recorded
from tests.models.hunyuanvideo.upstream import picture
from tests.models.hunyuanvideo.videos import (
    CHECKPOINTS,
    LENGTH,
    PROMPT,
    SHAPE,
    TILES,
    VIDEOS,
    changed,
    embeddings,
)
from tests.models.recorded import Record
from tests.tolerances import TOLERANCES
from tpuport.errors import UsageError

ATOL = TOLERANCES["video float32"]

#: Run by upstream's own code in each run of the tests. The rest: ``-m sweep``.
LIVE = ("hunyuanvideo-1.5-image", "hunyuanvideo-13b-guidance-6")


@pytest.fixture(scope="module")
def folders(
    hunyuanvideo_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """The folder of a checkpoint, made once."""

    @functools.cache
    def get(name: str) -> Path:
        form, changes = CHECKPOINTS[name]
        demo = hunyuanvideo_folders[form]
        if not changes:
            return demo
        return changed(demo, tmp_path_factory.mktemp("changed") / "it", changes)

    return get


@pytest.fixture(scope="module")
def sessions(
    folders: Callable[[str], Path], cache_dir: Path
) -> Iterator[Callable[..., Any]]:
    """The session of a checkpoint, opened once: its weights and programs stay."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def get(name: str, blocks: str = "native") -> Any:
            session = tpuport.load(
                "hunyuanvideo",
                weights=folders(name),
                cache_dir=cache_dir,
                blocks=blocks,
            )
            return stack.enter_context(session)

        yield get


@pytest.fixture
def record(folders: Callable[[str], Path]) -> Callable[[str], Record]:
    def read(name: str) -> Record:
        video = VIDEOS[name]
        return Record.read(name, video.source(folders(video.checkpoint)))

    return read


# ------------------------------------------------------------------ the records


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in LIVE else pytest.mark.sweep) for n in VIDEOS],
)
def test_a_record_is_what_upstream_makes(
    name: str, folders: Callable[[str], Path], record: Callable[[str], Record]
) -> None:
    video = VIDEOS[name]
    record(name).check_live(video.live(folders(video.checkpoint)))


def test_there_is_a_record_of_each_video_and_no_other() -> None:
    kept = {path.stem for path in recorded.FOLDER.glob("hunyuanvideo*")}
    assert kept == set(VIDEOS)
    assert sum(path.stat().st_size for path in recorded.FOLDER.iterdir()) < 2e6


@pytest.mark.parametrize("key", ["request", "weights", "diffusers"])
def test_a_record_of_something_else_is_refused(
    key: str, folders: Callable[[str], Path]
) -> None:
    name = LIVE[0]
    video = VIDEOS[name]
    source = {**video.source(folders(video.checkpoint)), key: "another"}
    with pytest.raises(
        AssertionError, match=f"from {key} .*not another.*measure.references {name}"
    ):
        Record.read(name, source)


def test_a_record_tells_what_is_wrong_at_one_pixel(
    record: Callable[[str], Record],
) -> None:
    """Of the sample or not, at the last corner, moved or swapped."""
    draw = np.random.default_rng(0)
    frames = draw.random((1, 5, 48, 80, 3), dtype=np.float32)
    latents = draw.random((1, 4, 2, 3, 5), dtype=np.float32)
    kept = Record.of(frames, latents)
    kept.check(frames, latents)
    for wrong in (
        frames.swapaxes(2, 3).reshape(frames.shape),
        np.roll(frames, 1, axis=3),
        frames[:, ::-1],
        frames[..., ::-1],
    ):
        with pytest.raises(AssertionError, match="differ"):
            kept.check(np.ascontiguousarray(wrong), latents)
    for at in ((0, 0, 0, 0, 1), (0, 4, 47, 79, 2)):
        off = frames.copy()
        off[at] += 64 * 2 * recorded.MEANS_ATOL
        with pytest.raises(AssertionError, match="means differ"):
            kept.check(off, latents)
    with pytest.raises(AssertionError, match="latents differ by nan"):
        kept.check(frames, latents * np.float32(np.nan))


# -------------------------------------------------------------------- the videos


def check_video(
    name: str, sessions: Callable[..., Any], record: Callable[[str], Record]
) -> Any:
    """What a session makes, held to upstream's record of the same request."""
    video = VIDEOS[name]
    ours = sessions(video.checkpoint).generate(**video.options())
    record(name).check(ours.frames, ours.latents)
    return ours


@pytest.mark.parametrize("glyphs", ["glyphs", "no-glyphs"])
def test_text_to_video(glyphs: str, sessions: Any, record: Any) -> None:
    check_video(f"hunyuanvideo-1.5-{glyphs}", sessions, record)


@pytest.mark.parametrize("form", ["1.5", "13b"])
def test_upstreams_blocks(form: str, sessions: Any, record: Any) -> None:
    name = {"1.5": "1.5-glyphs", "13b": "13b-guidance-6"}[form]
    video = VIDEOS[f"hunyuanvideo-{name}"]
    session = sessions(video.checkpoint, "upstream")
    encoded, _ = sessions(video.checkpoint).run_stage(
        "encode", session.request(**video.options()), {}
    )
    latents, _ = session.run_stage(
        "denoise", session.request(**video.options()), encoded
    )
    kept = record(f"hunyuanvideo-{name}").latents
    assert np.abs(np.asarray(latents["latents"]) - kept).max() <= ATOL


@pytest.mark.parametrize("seeds", ["one-seed", "two-seeds"])
def test_two_videos_with_texts_of_other_lengths(
    seeds: str, sessions: Any, record: Any
) -> None:
    name = f"hunyuanvideo-1.5-two-videos-{seeds}"
    ours = check_video(name, sessions, record)
    if seeds == "two-seeds":
        video = VIDEOS[name]
        alone = {**video.asked, "prompt": PROMPT, "seed": video.options()["seed"][0]}
        one = sessions("1.5").generate(**alone)
        assert np.abs(one.frames[0] - ours.frames[0]).max() <= ATOL


def test_image_to_video_takes_its_size_from_the_image(
    sessions: Any, record: Any
) -> None:
    ours = check_video("hunyuanvideo-1.5-image", sessions, record)
    # A size class of 64 x 64 pixels in the shape of 140 x 80.
    assert ours.frames.shape[2:4] == (48, 80)


def test_two_videos_from_one_image(sessions: Any, record: Any) -> None:
    check_video("hunyuanvideo-1.5-image-two-videos", sessions, record)


def test_two_images_make_what_each_makes_alone(sessions: Any) -> None:
    images = [picture(seed=1), picture(seed=2)]
    session = sessions("small images")
    both = session.generate([PROMPT] * 2, image=images, seed=[3, 4], **LENGTH)
    second = session.generate(PROMPT, image=images[1], seed=4, **LENGTH)
    assert np.abs(both.frames[1] - second.frames[0]).max() <= ATOL
    assert np.abs(both.frames[0] - both.frames[1]).max() > 100 * ATOL


def test_without_guidance_the_negative_prompt_is_not_run(
    sessions: Any, record: Any
) -> None:
    ours = check_video("hunyuanvideo-1.5-no-guidance", sessions, record)
    (step,) = [r for r in ours.report.stages[1].attention if r["query"][2] > 60][:1]
    assert step["query"][0] == 1


def test_flow_shift_and_steps_off_the_defaults(sessions: Any, record: Any) -> None:
    check_video("hunyuanvideo-1.5-flow-shift", sessions, record)


def test_embeddings_and_latents_in_place_of_prompts_and_a_seed(
    sessions: Any, record: Any, folders: Callable[[str], Path]
) -> None:
    name = "hunyuanvideo-1.5-embeddings"
    video = VIDEOS[name]
    asked = video.options()
    embeds = embeddings(video.pipeline(folders("1.5")), asked.pop("prompt"))
    session = sessions("1.5")
    ours = session.generate(**embeds, **asked)
    record(name).check(ours.frames, ours.latents)
    del embeds["prompt_embeds_mask_2"]
    with pytest.raises(UsageError, match="without prompt_embeds_mask_2"):
        session.generate(**embeds, **SHAPE)


@pytest.mark.parametrize("scale", [6, 2])
def test_13b_with_its_guidance_as_an_input(
    scale: int, sessions: Any, record: Any
) -> None:
    check_video(f"hunyuanvideo-13b-guidance-{scale}", sessions, record)


def test_13b_with_true_guidance_and_two_videos(sessions: Any, record: Any) -> None:
    check_video("hunyuanvideo-13b-true-guidance", sessions, record)


def test_meanflow_takes_the_next_time_as_well(sessions: Any, record: Any) -> None:
    """The step-distilled form: two times, no guidance, from an image."""
    check_video("hunyuanvideo-1.5-step-distilled", sessions, record)
    session, image = sessions("step-distilled"), picture()
    with pytest.raises(UsageError, match="distilled to 4, 8, 12 steps"):
        session.generate(PROMPT, image=image, num_inference_steps=5)
    with pytest.raises(UsageError, match="takes no other than 1"):
        session.generate(PROMPT, image=image, guidance_scale=6.0, num_inference_steps=4)


def test_tiled_decode_is_upstreams(
    folders: Callable[[str], Path],
    cache_dir: Path,
    record: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over 10 s: decoders of five sizes, four tiles and the whole picture."""
    make = AutoencoderKLHunyuanVideo15.__init__

    @functools.wraps(make)
    def small_tiles(self: Any, *args: Any, **given: Any) -> None:
        make(self, *args, **given)
        self.enable_tiling(**TILES)

    monkeypatch.setattr(AutoencoderKLHunyuanVideo15, "__init__", small_tiles)
    name = "hunyuanvideo-1.5-tiles"
    video = VIDEOS[name]
    with tpuport.load(
        "hunyuanvideo", weights=folders("1.5"), cache_dir=cache_dir
    ) as session:
        ours = session.generate(vae_tiling="on", **video.options())
        whole = session.generate(vae_tiling="off", **video.options())
    record(name).check(ours.frames, ours.latents)
    # 4 x 6 latents in four tiles of as many sizes; whole, in one.
    assert len(ours.report.stages[2].compiles) == 4
    assert len(whole.report.stages[2].compiles) == 1
    assert np.abs(ours.frames - whole.frames).max() > ATOL
