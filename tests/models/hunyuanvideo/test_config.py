"""Variants, size classes, and what each refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tpuport
from tests.models.hunyuanvideo.upstream import picture
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import UsageError, WeightsError
from tpuport.models.hunyuanvideo.config import bucket
from tpuport.models.hunyuanvideo.plugin import PORT

Open = Callable[..., Any]


@pytest.fixture
def load(hunyuanvideo_folders: dict[str, Path], cache_dir: Path) -> Open:
    def open_session(variant: str, form: str = "1.5") -> Any:
        return tpuport.load(
            "hunyuanvideo",
            weights=hunyuanvideo_folders[form],
            variant=variant,
            cache_dir=cache_dir,
        )

    return open_session


#: name: (size, frames, steps, guidance, shift), as published.
PUBLISHED = {
    "1.5-480p-t2v": ((480, 848), 121, 50, 6.0, 5.0),
    "1.5-480p-i2v": ((480, 848), 121, 50, 6.0, 5.0),
    "1.5-720p-t2v": ((720, 1280), 121, 50, 6.0, 9.0),
    "1.5-720p-i2v": ((720, 1280), 121, 50, 6.0, 7.0),
    "1.5-480p-t2v-cfg-distilled": ((480, 848), 121, 50, 1.0, 5.0),
    "1.5-480p-i2v-cfg-distilled": ((480, 848), 121, 50, 1.0, 5.0),
    "1.5-720p-t2v-cfg-distilled": ((720, 1280), 121, 50, 1.0, 9.0),
    "1.5-720p-i2v-cfg-distilled": ((720, 1280), 121, 50, 1.0, 7.0),
    "1.5-480p-i2v-step-distilled": ((480, 848), 121, 12, 1.0, 7.0),
    "13b": ((720, 1280), 129, 50, 6.0, 7.0),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_defaults_of_the_published_checkpoints(name: str) -> None:
    variant = PORT.variant(name)
    found = (
        (variant.height, variant.width),
        variant.num_frames,
        variant.num_inference_steps,
        variant.guidance_scale,
        variant.options["flow_shift"],
    )
    assert found == PUBLISHED[name]
    assert variant.fps == 24
    assert variant.tasks == (("i2v",) if "i2v" in name else ("t2v",))


def test_the_default_size_is_the_bucket_of_16_to_9() -> None:
    for variant in PORT.variants:
        if variant.resolutions:
            target = next(iter(variant.resolutions.values()))
            assert bucket(target, (9, 16)) == (variant.height, variant.width)


@pytest.mark.parametrize(
    ("resolution", "aspect", "size"),
    [
        ("480p", "16:9", (480, 848)),
        ("480p", "9:16", (848, 480)),
        ("480p", "1:1", (640, 640)),
        ("720p", "4:3", (832, 1104)),
        ("720p", None, (720, 1280)),
        ("480p", None, (480, 848)),
        (None, "1:1", (128, 128)),
    ],
)
def test_size_classes_and_aspect_ratios(
    resolution: str | None, aspect: str | None, size: tuple[int, int], load: Open
) -> None:
    with load("demo") as session:
        request = session.request(
            prompt="a", resolution=resolution, aspect_ratio=aspect
        )
    # Without a ratio it is upstream's 16 to 9.
    assert (request.height, request.width) == size


def test_sizes_that_do_not_exist(load: Open) -> None:
    with load("demo") as session:
        for asked, words in (
            (
                {"resolution": "999p"},
                "'999p': variant demo has the size classes demo, 480p, 720p",
            ),
            ({"aspect_ratio": "5:1"}, "buckets go from 1:4 to 4:1"),
            ({"aspect_ratio": "wide"}, "'wide' is not WIDTH:HEIGHT"),
            ({"resolution": "480p", "height": 480}, "exclude height, width"),
            ({"height": 100}, "multiple of 16; nearest valid: 96 or 112"),
            ({"num_frames": 8}, r"4n\+1 frames; nearest valid: 5 or 9"),
        ):
            with pytest.raises(UsageError, match=words):
                session.request(prompt="a", **asked)
    with (
        load("demo-13b", "13b") as session,
        pytest.raises(UsageError, match="has no size classes"),
    ):
        session.request(prompt="a", resolution="480p")


def test_a_distilled_variant_refuses_what_breaks_it(load: Open) -> None:
    with load("1.5-480p-t2v-cfg-distilled") as session:
        with pytest.raises(UsageError, match="takes no other than 1"):
            session.request(prompt="a", guidance_scale=6.0)
        with pytest.raises(UsageError, match="distilled into it at 50 steps"):
            session.request(prompt="a", num_inference_steps=20)
        assert not session.request(prompt="a").guided
    with load("1.5-480p-i2v-step-distilled") as session:
        source = tpuport.core.files.sources.read_image(picture())
        with pytest.raises(UsageError, match="distilled to 4, 8, 12 steps"):
            session.request(prompt="a", source=source, num_inference_steps=50)
        request = session.request(prompt="a", source=source, num_inference_steps=8)
        assert request.task == "i2v"


def test_the_task_follows_from_the_inputs(load: Open) -> None:
    source = tpuport.core.files.sources.read_image(picture())
    with load("demo") as session:
        assert session.request(prompt="a").task == "t2v"
        assert session.request(prompt="a", source=source).task == "i2v"
    with (
        load("1.5-480p-i2v") as session,
        pytest.raises(UsageError, match=r"from an image \(--image\), not from"),
    ):
        session.request(prompt="a")
    for variant, form in (("1.5-480p-t2v", "1.5"), ("demo-13b", "13b")):
        with (
            load(variant, form) as session,
            pytest.raises(UsageError, match=r"not from an image.*i2v.* can"),
        ):
            session.request(prompt="a", source=source)


def test_guidance_below_one_and_the_other_forms_option(load: Open) -> None:
    with load("demo") as session:
        with pytest.raises(UsageError, match=r"0\.5 is below 1"):
            session.request(prompt="a", guidance_scale=0.5)
        with pytest.raises(UsageError, match="true_cfg_scale is for 13b"):
            session.request(prompt="a", options={"true_cfg_scale": 2})
        with pytest.raises(UsageError, match="is none of auto, on, off"):
            session.generate("a", vae_tiling="yes")
        with pytest.raises(UsageError, match="has no option 'vae_tiling'"):
            session.request(prompt="a", options={"vae_tiling": "on"})
        with pytest.raises(UsageError, match="the schedule has 1000"):
            session.request(prompt="a", num_inference_steps=1001)


def test_a_variant_of_another_form_than_the_checkpoint(
    load: Open, hunyuanvideo_folders: dict[str, Path]
) -> None:
    with pytest.raises(WeightsError, match="variant 13b is not of"):
        load("13b", "1.5")
    with pytest.raises(WeightsError, match=r"variant 1\.5-480p-t2v is not of"):
        load("1.5-480p-t2v", "13b")


def rewrite(file: Path, **values: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_checkpoint_tells_which_variant_it_is(
    hunyuanvideo_folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("model_index.json", "guider", "scheduler", "transformer"):
        source = hunyuanvideo_folders["1.5"] / name
        if source.is_dir():
            (folder / name).mkdir()
            for file in source.glob("*.json"):
                shutil.copy(file, folder / name)
        else:
            shutil.copy(source, folder)
    for variant in PORT.variants:
        if not variant.name.startswith("1.5"):
            continue
        config = {
            k: v
            for k, v in variant.configs["transformer"].items()
            if k != "_class_name"
        }
        rewrite(folder / "transformer" / "config.json", **config)
        rewrite(
            folder / "scheduler" / "scheduler_config.json",
            shift=variant.options["flow_shift"],
        )
        rewrite(
            folder / "guider" / "guider_config.json",
            guidance_scale=variant.guidance_scale,
        )
        found = PORT.detect(Checkpoint(folder, "x"))
        assert found.name == variant.name
        assert found.options == variant.options
    # Another shift is the checkpoint's own, as upstream's pipeline takes it.
    rewrite(folder / "scheduler" / "scheduler_config.json", shift=3.0)
    assert PORT.detect(Checkpoint(folder, "x")).options["flow_shift"] == 3.0
    rewrite(folder / "transformer" / "config.json", num_layers=7)
    custom = PORT.detect(Checkpoint(folder, "x"))
    assert custom.name == "custom"
    assert custom.tasks == ("t2v",)


def test_a_guider_that_does_more_than_the_plain_formula(
    hunyuanvideo_folders: dict[str, Path], tmp_path: Path, cache_dir: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(hunyuanvideo_folders["1.5"], folder)
    rewrite(folder / "guider" / "guider_config.json", guidance_rescale=0.5)
    with (
        tpuport.load("hunyuanvideo", weights=folder, cache_dir=cache_dir) as session,
        pytest.raises(UsageError, match=r"guidance_rescale 0\.5, which is not"),
    ):
        session.request(prompt="a")


def test_image_to_video_without_the_image_encoder(
    hunyuanvideo_folders: dict[str, Path], tmp_path: Path, cache_dir: Path
) -> None:
    source = tpuport.core.files.sources.read_image(picture())
    for missing, error in (
        ("feature_extractor", WeightsError),
        ("image_encoder", UsageError),
    ):
        folder = tmp_path / missing
        shutil.copytree(hunyuanvideo_folders["1.5"], folder)
        shutil.rmtree(folder / missing)
        with tpuport.load(
            "hunyuanvideo", weights=folder, variant="demo", cache_dir=cache_dir
        ) as session:
            session.request(prompt="a")
            with pytest.raises(error, match=missing):
                session.request(prompt="a", source=source)


def test_true_guidance_without_a_negative_prompt(load: Open) -> None:
    """Upstream's pipeline does not guide then; here it is said."""
    options = {"true_cfg_scale": 3}
    with load("demo-13b", "13b") as session:
        assert session.request(prompt="a", negative_prompt="b", options=options)
        with pytest.raises(UsageError, match="needs a negative prompt"):
            session.request(prompt="a", options=options)


def test_an_autoencoder_of_another_ratio_in_space(
    hunyuanvideo_folders: dict[str, Path], tmp_path: Path, cache_dir: Path
) -> None:
    """The stored tensors of 4 to 1 and of 8 to 1 have the same shapes."""
    folder = tmp_path / "checkpoint"
    shutil.copytree(hunyuanvideo_folders["13b"], folder)
    rewrite(folder / "vae/config.json", spatial_compression_ratio=4)
    with (
        tpuport.load("hunyuanvideo", weights=folder, cache_dir=cache_dir) as session,
        pytest.raises(WeightsError, match=r"vae/config\.json: spatial_.* is 4: only 8"),
    ):
        session.request(prompt="a")
