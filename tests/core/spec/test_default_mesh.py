"""The mesh that is taken where none is named."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.plan.default_mesh import default_mesh
from tpuport.core.spec.model_port import with_blocks
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.plugins import get_port


@dataclass
class Device:
    """What default_mesh looks at."""

    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"


def chosen(folder: Path, blocks: str, devices: list[Any], rows: int = 2) -> MeshSpec:
    port = with_blocks(get_port("cogvideox"), blocks)
    checkpoint = Checkpoint(folder, "x")
    return default_mesh(port, checkpoint, devices, rows=rows)


def test_one_device_on_a_cpu(demo_folder: Path) -> None:
    assert chosen(demo_folder, "native", [Device("cpu")] * 8) == MeshSpec()


def test_native_blocks_split_tokens_and_upstreams_heads(demo_folder: Path) -> None:
    devices = [Device()] * 8
    assert chosen(demo_folder, "native", devices) == MeshSpec(dp=2, sp=4)
    upstream = chosen(demo_folder, "upstream", devices)
    assert upstream.tp > 1
    assert upstream.dp == 2
