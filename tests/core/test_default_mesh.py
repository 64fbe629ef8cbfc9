"""The mesh that is taken where none is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tpuport.core import default_mesh as module
from tpuport.core.checkpoint import Checkpoint
from tpuport.core.chips import CHIPS
from tpuport.core.default_mesh import WEIGHT_SHARE, default_mesh, weight_bytes
from tpuport.core.mesh import MeshSpec
from tpuport.core.spec import with_blocks
from tpuport.plugins import get_port


@dataclass
class Device:
    """What default_mesh looks at."""

    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"


def chosen(folder: Path, blocks: str, devices: list[Any], rows: int = 2) -> MeshSpec:
    port = with_blocks(get_port("cogvideox"), blocks)
    checkpoint = Checkpoint(folder, "x")
    return default_mesh(port, checkpoint, devices, rows=rows, dtype="bfloat16")


def test_one_device_on_a_cpu(demo_folder: Path) -> None:
    assert chosen(demo_folder, "native", [Device("cpu")] * 8) == MeshSpec()


def test_native_blocks_split_tokens_and_upstreams_heads(demo_folder: Path) -> None:
    devices = [Device()] * 8
    assert chosen(demo_folder, "native", devices) == MeshSpec(dp=2, sp=4)
    upstream = chosen(demo_folder, "upstream", devices)
    assert upstream.tp > 1
    assert upstream.dp == 2


@pytest.mark.parametrize(
    ("chips", "tp"), [(0.1, 1), (0.99, 1), (1.01, 2), (1.9, 2), (2.1, 4), (50.0, 4)]
)
def test_heads_are_split_as_far_as_weights_need(
    chips: float, tp: int, demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = WEIGHT_SHARE * CHIPS["v6e"].hbm_usable_bytes
    monkeypatch.setattr(module, "weight_bytes", lambda *a, **k: int(chips * room))
    found = chosen(demo_folder, "native", [Device()] * 8)
    # The demo has four heads: more parts there are not.
    assert found == MeshSpec(dp=2, sp=4 // tp, tp=tp)


def test_weights_of_a_stage_and_of_all(demo_folder: Path) -> None:
    port, checkpoint = get_port("cogvideox"), Checkpoint(demo_folder, "x")
    one = weight_bytes(port, checkpoint, "bfloat16", together=False)
    everything = weight_bytes(port, checkpoint, "bfloat16", together=True)
    wide = weight_bytes(port, checkpoint, "float32", together=True)
    assert 0 < one < everything
    assert wide == 2 * everything
    files = list(demo_folder.rglob("*.safetensors"))
    stored = sum(p.stat().st_size for p in files)
    # The demo's files hold float32, and headers.
    assert 0.95 < wide / stored < 1.05
