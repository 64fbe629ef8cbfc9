"""Published variants that start from an image, traced at their real size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tpuport.core.media import read_image
from tpuport.core.mesh import MeshSpec, build_mesh
from tpuport.core.planning.abstract import abstract_programs, device_bytes
from tpuport.core.planning.configs import config_checkpoint
from tpuport.core.planning.planner import Requests
from tpuport.core.report import Reporter
from tpuport.core.spec import with_blocks
from tpuport.plugins import get_port


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
    port = with_blocks(get_port(model), "native")
    variant = port.variant(name)
    form = port.form_of(variant)
    mesh = build_mesh(MeshSpec(sp=4), jax.devices()[:4])
    source = read_image(np.full((*size, 3), 128, np.uint8))
    with config_checkpoint(form, variant, tmp_path) as checkpoint:
        request = Requests(form, variant, checkpoint, mesh, Reporter()).request(
            prompt="a fox", height=size[0], width=size[1], num_frames=17, source=source
        )
        programs = abstract_programs(
            form,
            variant,
            checkpoint,
            request,
            mesh,
            dtype="bfloat16",
            stages=["denoise"],
            inputs={source.kind: source.for_videos(1)},
        )
        found = [(p.program, len(p.records())) for p in programs]
    assert [program for program, _ in found] == ["step"]
    # Its attention was traced, so the whole of the model was.
    assert all(calls for _, calls in found)


def test_what_a_stage_holds_beside_a_program_is_counted(tmp_path: Path) -> None:
    """Weights of its other components, and outputs that wait on the devices."""
    port = get_port("hunyuanvideo")
    variant = port.variant("1.5-480p-t2v")
    form = port.form_of(variant)
    mesh = build_mesh(MeshSpec(), jax.devices()[:1])
    with config_checkpoint(form, variant, tmp_path) as checkpoint:
        request = Requests(form, variant, checkpoint, mesh, Reporter()).request(
            prompt=["a fox", 'a red car that says "stop"'], batched=False
        )
        programs = list(
            abstract_programs(
                form,
                variant,
                checkpoint,
                request,
                mesh,
                dtype="bfloat16",
                stages=["encode"],
            )
        )
    weights = {p.component: device_bytes(p.loaded.weights) for p in programs}
    assert len(weights) == 2
    waiting = {
        p.resident - sum(size for n, size in weights.items() if n != p.component)
        for p in programs
    }
    # Of every call of a batch but the last; which batch has most is in all programs.
    (held,) = waiting
    outputs = [device_bytes(p.outputs()[1]) for p in programs]
    assert (
        min(outputs)
        <= held
        <= sum(p.calls * n for p, n in zip(programs, outputs, strict=True))
    )
    assert held > 0
