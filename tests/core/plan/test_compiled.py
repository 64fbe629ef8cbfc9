"""Accounts of programs compiled for TPUs that are not there.

In processes of their own: the compiler reads its environment once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.processes import needs_libtpu, run_json
from tpuport.core.mesh.slices import compile_environment, parse_topology

pytestmark = needs_libtpu

COLLECTIVES = """
import dataclasses, json
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.cost.program_time import account
from tpuport.core.cost.hlo import parse
from tpuport.core.cost.network import Network
from tpuport.core.mesh.slices import parse_topology, topology_devices

topology = parse_topology("v6e-8")
mesh = build_mesh(MeshSpec(dp=1, sp=2, tp=4), topology_devices(topology))
network = Network(topology, chip("v6e"), list(mesh.devices.flat))

def kernels(instruction, operands):
    raise AssertionError(instruction.name)

def shown(f, *shapes):
    args = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, spec))
            for s, spec in shapes]
    compiled = jax.jit(f).lower(*args).compile()
    found = account(parse(compiled.as_text()), chip("v6e"), network,
                    dict(mesh.shape), kernels)
    return {
        "seconds": found.seconds,
        "collectives": [dataclasses.asdict(c) for c in found.collectives()],
        "categories": found.split(),
        "notes": found.notes,
        "times": {r.name: r.times for r in found.rows},
    }

def split(f, specs, out):
    return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)

def summed(x):
    return split(lambda x: jax.lax.psum(x, "tp"), P(None, "tp"), P())(x)

def gathered(x):
    part = lambda x: jax.lax.all_gather(x, "sp", axis=0, tiled=True)
    return split(part, P("sp"), P())(x)

def rounds(x):
    def part(x):
        def body(_, x):
            return jax.lax.psum(jnp.sin(x), "tp")
        return jax.lax.fori_loop(0, 7, body, x)
    return split(part, P(None, "tp"), P(None, "tp"))(x)

def product(x, w):
    return x @ w

large = (4096, 4096)
print(json.dumps({
    "sum": shown(summed, (large, P(None, "tp"))),
    "gather": shown(gathered, (large, P("sp"))),
    "loop": shown(rounds, ((1024, 4096), P(None, "tp"))),
    "product": shown(product, (large, P()), (large, P())),
    "twice": shown(product, ((8192, 4096), P()), (large, P())),
    "spread": shown(product, ((4 * 8192, 4096), P("tp")), (large, P())),
}))
"""

TRENDS = """
import json, sys
from pathlib import Path
from tpuport import targets
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import parse_topology
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.pipelines.stand_in import write_configs
from tpuport.core.plan.pipeline_plan import (
    Folders, plan_pipeline, rehearsed, topology_mesh
)
from tpuport.core.reports import Reporter
from tpuport.core.spec.run_settings import RunSettings
from tpuport.plugins import folder_of, get_model

cache, quiet = Path(sys.argv[1]), Reporter()
place = cache / "small"
place.mkdir()
demo = get_model("cogvideox").variants["demo"]
write_configs(place, demo.read(folder_of("cogvideox")))
folder = PipelineFolder.find(str(place), quiet)
settings = RunSettings.read({"dtype": "bfloat16", "attention": "reference"})
topology = parse_topology("v6e-4")

def plan(mesh, **changes):
    asked = {"height": 256, "width": 256, "num_frames": 17, **changes}
    asked |= {"prompt": "a panda", "num_inference_steps": 3, "output_type": "latent"}
    spec = MeshSpec.parse(mesh)
    placed = topology_mesh(topology, spec)
    target = targets.claimed_target(folder.class_name, placed, settings, quiet)
    found = rehearsed(folder, target, "bfloat16", asked, quiet)
    return plan_pipeline(
        folder, found, topology, spec, settings, arguments=asked, stages=["denoise"],
        kept=Folders(cache / "schedules"), reporter=quiet,
    ).as_dict()

print(json.dumps({
    "one": plan("1,1,1"),
    "four": plan("2,1,2"),
    "frames": plan("2,1,2", num_frames=33),
    "size": plan("2,1,2", height=512, width=512),
}))
"""


def run(program: str, *args: str) -> Any:
    variables = compile_environment(parse_topology("v6e-8"))
    return run_json(program, *args, **variables)


@pytest.fixture(scope="module")
def compiled() -> Any:
    return run(COLLECTIVES)


def test_collectives_have_the_axis_that_they_cross(compiled: Any) -> None:
    (use,) = compiled["sum"]["collectives"]
    assert (use["kind"], use["axis"], use["count"]) == ("all-reduce", "tp", 1)
    assert use["bytes"] == 4096 * 1024 * 4
    # Nothing else is on the links and no work beside it: all of it is waited for.
    assert use["exposed_seconds"] == pytest.approx(use["seconds"], 1e-3)
    (use,) = compiled["gather"]["collectives"]
    assert (use["kind"], use["axis"]) == ("all-gather", "sp")
    assert use["bytes"] == 4096 * 4096 * 4
    # In a loop every round counts.
    (use,) = compiled["loop"]["collectives"]
    assert (use["kind"], use["axis"], use["count"]) == ("all-reduce", "tp", 7)
    assert use["bytes"] == 7 * 1024 * 1024 * 4
    assert compiled["loop"]["notes"] == []


def test_products_take_time_by_their_rows_on_a_chip(compiled: Any) -> None:
    one, twice, four = (compiled[name] for name in ("product", "twice", "spread"))
    assert one["categories"]["matmul"] > 0.6 * one["seconds"]
    assert one["categories"]["collective"] == one["categories"]["attention"] == 0
    assert 1.8 < twice["seconds"] / one["seconds"] < 2.2
    assert four["seconds"] == pytest.approx(twice["seconds"], rel=0.02)
    assert four["collectives"] == []


@pytest.mark.slow
def test_plans_go_with_frames_sizes_and_chips(tmp_path: Path) -> None:
    """The demo's transformer, with attention that the compiler estimates itself."""
    found = run(TRENDS, str(tmp_path))
    step = {name: plan["seconds_per_step"] for name, plan in found.items()}
    memory = {name: plan["hbm_bytes_per_chip"] for name, plan in found.items()}
    flops = {name: plan["model_flops_per_step"] for name, plan in found.items()}
    assert all(plan["fits"] for plan in found.values())
    assert step["four"] < step["one"]
    assert step["four"] < step["frames"] < step["size"]
    assert memory["four"] < memory["frames"] < memory["size"]
    # What is asked for does not depend on the chips.
    assert flops["four"] == pytest.approx(flops["one"])
    assert flops["frames"] > 1.5 * flops["four"]
    # What tpuport sets of the compiler's flags for a step is told.
    assert found["one"]["compiler_flags"]
