"""Published variants, traced at their real size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tpuport.core.enums import Dtype
from tpuport.core.files.sources import read_image
from tpuport.core.mesh.device_mesh import place_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.plan.abstract_programs import (
    AbstractProgram,
    abstract_programs,
    device_bytes,
)
from tpuport.core.plan.config_checkpoint import config_checkpoint
from tpuport.core.programs.components import Components
from tpuport.core.spec.model_port import with_blocks
from tpuport.core.spec.requests import Requests
from tpuport.core.spec.run_settings import RunSettings
from tpuport.plugins import get_port


def programs(
    model: str, name: str, stage: str, devices: int, cache: Path, **asked: Any
) -> list[AbstractProgram]:
    """Those of a stage, of a published variant's own configs; nothing is compiled."""
    port = with_blocks(get_port(model), "native")
    variant = port.variant(name)
    form = port.form_of(variant)
    placed = place_mesh(MeshSpec(sp=devices), jax.devices()[:devices])
    with config_checkpoint(form, variant, cache) as checkpoint:
        requests = Requests(form, variant, checkpoint, placed)
        source = asked.get("source")
        settings = RunSettings(dtype=Dtype.BFLOAT16)
        found = abstract_programs(
            Components(form, checkpoint, placed.mesh, settings),
            requests.request(**asked),
            settings,
            stages=[stage],
            inputs={source.kind: source.for_videos(1)} if source else None,
        )
        return [p for p in found if p.traced()]


@pytest.mark.parametrize(
    ("model", "name", "size"),
    [
        ("cogvideox", "5b-i2v", (480, 720)),
        ("cogvideox", "1.5-5b-i2v", (96, 160)),
        ("hunyuanvideo", "1.5-480p-i2v", (96, 160)),
        ("hunyuanvideo", "1.5-720p-i2v", (96, 160)),
    ],
)
def test_a_step_from_an_image_is_traced(
    model: str,
    name: str,
    size: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a plan and a compile begin with: nothing is compiled here, or drawn."""

    def drawn(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("noise was drawn for shapes alone")

    monkeypatch.setattr("diffusers.utils.torch_utils.randn_tensor", drawn)
    asked: dict[str, Any] = {
        "prompt": "a fox",
        "height": size[0],
        "width": size[1],
        "num_frames": 17,
        "source": read_image(np.full((*size, 3), 128, np.uint8)),
    }
    (step,) = programs(model, name, "denoise", 4, tmp_path, **asked)
    assert step.asked.name == "step"
    # Its attention was traced, so the whole of the model was.
    assert step.attention


def test_what_a_stage_holds_beside_a_program_is_counted(tmp_path: Path) -> None:
    """Weights of its other components, and outputs that wait on the devices."""
    asked: dict[str, Any] = {
        "prompt": ["a fox", 'a red car that says "stop"'],
        "batched": False,
    }
    made = programs("hunyuanvideo", "1.5-480p-t2v", "encode", 1, tmp_path, **asked)
    weights = {p.asked.program.component: device_bytes(p.loaded.weights) for p in made}
    assert len(weights) == 2
    # Of every call of a batch but the last; the batch that has most is in all programs.
    (held,) = {
        p.resident
        - sum(size for n, size in weights.items() if n != p.asked.program.component)
        for p in made
    }
    outputs = [(p.calls, device_bytes(p.outputs()[1])) for p in made]
    assert 0 < min(size for _, size in outputs) <= held
    assert held <= sum(calls * size for calls, size in outputs)
