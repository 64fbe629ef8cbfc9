"""Options of ``--attention`` reach the denoiser, and only it; the report tells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuport
from tpuport.errors import UsageError

SHAPE = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 1}


def run(folder: Path, cache: Path, attention: str) -> Any:
    with tpuport.load(
        "cogvideox", weights=folder, attention=attention, cache_dir=cache
    ) as session:
        return session.generate(prompt="a fox", seed=1, **SHAPE)


def attention_of(result: Any, stage: str) -> list[dict[str, Any]]:
    (report,) = [r for r in result.report.stages if r.stage == stage]
    return list(report.attention)


def test_options_change_the_denoiser_alone_and_the_report_tells(
    demo_folder: Path, cache_dir: Path
) -> None:
    plain = run(demo_folder, cache_dir, "blockwise")
    tiled = run(demo_folder, cache_dir, "blockwise:block_q=32;block_kv=48")
    near = run(demo_folder, cache_dir, "blockwise:window=9,9;k_smooth=on")
    for found in attention_of(tiled, "denoise"):
        assert found["implementation"] == "blockwise"
        assert found["blocks"] == {"block_q": 32, "block_kv": 48}
    for found in attention_of(near, "denoise"):
        assert (found["window"], found["k_smooth"]) == ((9, 9), True)
    # The encoder runs as it did; options are not for it.
    assert attention_of(near, "encode") == attention_of(plain, "encode")
    # Tiles are the same result to rounding, a window is another one.
    assert np.abs(tiled.frames - plain.frames).max() < 1e-4
    assert np.abs(near.frames - plain.frames).max() > 1e-3


def test_a_kernel_for_other_devices_is_refused_before_weights_are_read(
    demo_folder: Path, cache_dir: Path
) -> None:
    with pytest.raises(UsageError, match="'splash' is a kernel for tpu; the devices"):
        run(demo_folder, cache_dir, "splash:k_smooth=on")
    with pytest.raises(UsageError, match="k_smooth=maybe: choose on or off"):
        run(demo_folder, cache_dir, "auto:k_smooth=maybe")
