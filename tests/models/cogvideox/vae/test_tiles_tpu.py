"""The estimate that decides on tiles, against the compiler for a TPU v6e.

In a process of its own: the TPU compiler reads its environment once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

from tests.models.cogvideox.test_tpu import ENVIRONMENT, ROOT
from tests.processes import run_python
from tpuport.models.cogvideox.vae_memory import MARGIN

PROGRAM = """
import json, sys
from pathlib import Path
from tpuport.core.mesh.device_memory import planned_bytes
from tpuport.core.spec.choices import with_chosen
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.device_mesh import place_mesh
from tpuport.core.plan.abstract_programs import abstract_programs
from tpuport.core.plan.config_checkpoint import config_checkpoint
from tpuport.core.spec.requests import Requests
from tpuport.core.mesh.slices import parse_topology, topology_devices
from tpuport.plugins import get_port

port = with_chosen(get_port("cogvideox"), {"vae": sys.argv[2]})
variant = port.variant("5b")
devices = topology_devices(parse_topology("v6e-8"))
placed = place_mesh(MeshSpec(sp=8), devices)
mesh = placed.mesh
with config_checkpoint(port.form_of(variant), variant, Path(sys.argv[1])) as checkpoint:
    requests = Requests(port, variant, checkpoint, placed)
    request = requests.request(prompt="a", height=192, width=256, num_frames=9)
    decided = []
    programs = abstract_programs(
        port, variant, checkpoint, request, mesh, dtype="bfloat16", stages=["decode"],
        vae_tiling="off", decided=decided.append,
    )
    compiled = [planned_bytes(p.lowered().compile()) for p in programs]
print(json.dumps([decided[0].as_dict(), compiled]))
"""

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
    ),
    pytest.mark.slow,
]


@pytest.mark.parametrize("vae", ["torchax", "flax"])
def test_the_estimate_is_of_the_size_of_the_compiled_program(
    vae: str, tmp_path: Path
) -> None:
    path = os.pathsep.join([str(ROOT), *sys.path])
    done = run_python(
        ["-c", PROGRAM, str(tmp_path), vae],
        environment=os.environ | ENVIRONMENT | {"PYTHONPATH": path, "XLA_FLAGS": ""},
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    decided, compiled = json.loads(done.stdout.splitlines()[-1])
    assert decided["limit"] == int(31.25 * 2**30)
    assert not decided["tiled"]
    estimate = decided["chosen"]["bytes"]
    assert (1 - MARGIN) * max(compiled) <= estimate <= 2 * max(compiled)
