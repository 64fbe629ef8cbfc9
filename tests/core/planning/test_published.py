"""Published variants that start from an image, traced at their real size."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from tpuport.core.media import read_image
from tpuport.core.mesh import MeshSpec, build_mesh
from tpuport.core.planning.abstract import abstract_programs
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
    model: str, name: str, size: tuple[int, int], tmp_path: Path
) -> None:
    """What a plan and a compile begin with: nothing is compiled here."""
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
