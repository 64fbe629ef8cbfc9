"""The checkpoint in the package shows what its prompt says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import CogVideoXPipeline
from safetensors import safe_open

import tpuport
from training.demo.evaluate import asked, right
from training.demo.shapes import FRAMES, SIDE


def test_the_demo_is_small_and_stored_in_float16(demo_folder: Path) -> None:
    files = [file for file in demo_folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    for file in demo_folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            kinds = {tensors.get_slice(name).get_dtype() for name in tensors.keys()}
        assert kinds == {"F16"}
