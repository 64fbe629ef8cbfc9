"""``--resolution`` and ``--aspect-ratio``: sides that a pipeline takes."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.tools import UPSTREAM, Cli
from tests.core.files.videos import read_back
from tests.pipelines.example import all_examples, made, saved
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs import size_class
from tpuport.cli.runs.variants import class_of_size
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter
from tpuport.errors import UsageError


def asked(
    monkeypatch: pytest.MonkeyPatch, default: tuple[Any, Any] = (480, 832), **how: Any
) -> tuple[int | None, int | None]:
    """Width and height, of a pipeline with these default sides and tokens of 16."""
    empty = inspect.Parameter.empty
    parameters = {
        name: SimpleNamespace(default=side, empty=empty)
        for name, side in zip(("height", "width"), default, strict=True)
    }
    monkeypatch.setattr(size_class, "token_side", lambda folder: 16)
    folder: Any = SimpleNamespace(
        parameters=parameters, class_name="A", fetched=lambda *_, **__: None
    )
    found = size_class.sized(Settings(**how), folder, Reporter())
    assert (found.resolution, found.aspect_ratio) == (None, None)
    return found.width, found.height


def test_a_class_is_a_number_of_pixels_in_a_shape(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, aspect, size in (
        ("720p", (9.0, 16.0), (1280, 720)),
        ("480", (9.0, 16.0), (848, 480)),
        ("480p", (16.0, 9.0), (480, 848)),
        ("480p", None, (848, 480)),  # the shape of the pipeline's own default
        (None, (1.0, 1.0), (624, 624)),  # as many pixels as the default
    ):
        assert asked(monkeypatch, resolution=name, aspect_ratio=aspect) == size
    # Without a shape, that of the image.
    pixels = np.zeros((64, 64, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    image = str(tmp_path / "a.png")
    assert asked(monkeypatch, resolution="720p", image=image) == (960, 960)


def test_a_pipeline_without_default_sides_is_asked_in_16_to_9(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    none = (None, None)
    assert asked(monkeypatch, none, resolution="720p") == (1280, 720)
    with pytest.raises(UsageError, match="--aspect-ratio: add --resolution"):
        asked(monkeypatch, none, aspect_ratio=(1.0, 1.0))


def test_a_long_image_needs_a_shape(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    image = str(tmp_path / "long.png")
    Image.fromarray(np.zeros((16, 144, 3), np.uint8)).save(image)
    with pytest.raises(UsageError, match="the image has the shape 144:16"):
        asked(monkeypatch, resolution="480p", image=image)
    how = {"image": image, "aspect_ratio": (1.0, 1.0)}
    assert asked(monkeypatch, resolution="480p", **how) == (640, 640)


@pytest.mark.parametrize("name", ["CogVideoXPipeline", "LTXPipeline"])
def test_the_side_of_a_token_is_upstreams(name: str, tmp_path: Path) -> None:
    pipeline, _ = made(all_examples()[name])
    folder = PipelineFolder.find(saved(pipeline, tmp_path / "a"), Reporter())
    scale = getattr(pipeline, "vae_spatial_compression_ratio", None)
    scale = scale or pipeline.vae_scale_factor_spatial
    assert size_class.token_side(folder) == (
        scale * pipeline.transformer.config.patch_size
    )


def test_the_video_has_the_size(cli: Cli, folder: Path) -> None:
    asked = ("generate", "--weights", folder, *UPSTREAM[:2], *UPSTREAM[4:])
    flags = ("--resolution", "24", "--aspect-ratio", "9:16")
    cli.good(*asked, *flags, "--out", "a.gif")
    # Of 1024 pixels: sides of 24 and 43, in tokens of 16.
    assert read_back("a.gif")[:3] == (5, 48, 32)


def test_a_size_has_a_class() -> None:
    """A variant's own size says how many pixels a shape by itself has."""
    assert class_of_size({"height": 720, "width": 1280}) == "720p"
    assert class_of_size({"height": 480}) is None
