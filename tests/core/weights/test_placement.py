"""Weights on their shards: where stacks go, and what the host holds on the way."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec

from tests.core.tracing.towers import Tower, tower
from tpuport.core.arrays import array_dtype, to_numpy
from tpuport.core.enums import Dtype
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.programs.components import Components
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights import placement
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.placement import abstract_weights, place_weights
from tpuport.core.weights.sharding import ShardingPlan, ShardRule, plan_sharding
from tpuport.errors import PluginError, ShardingError
from tpuport.plugins import get_port

ROOT = Path(__file__).resolve().parents[3]
RULES = (
    ShardRule(pattern=r"blocks\.\d+\.linear\.weight", spec=(None, "tp")),
    ShardRule(pattern=r"blocks\.\d+\.mix\.weight", spec=("tp", None)),
    ShardRule(pattern=r"blocks\.\d+\.linear\.bias", spec=()),
    ShardRule(pattern=r"(in|out)let\..*", spec=()),
)


def planned(
    module: Tower, rules: tuple[ShardRule, ...] = RULES
) -> tuple[PortedModule, ShardingPlan, Any]:
    mesh = build_mesh(MeshSpec(dp=1, tp=2))
    ported = PortedModule(module, model_runtime(mesh=mesh, platform="cpu"), ("blocks",))
    stored = dict(module.state_dict())
    plan = plan_sharding(rules, stored, dict(mesh.shape), component="tower")
    return ported, plan, mesh


def abstract(
    ported: PortedModule, plan: ShardingPlan, mesh: Any, **options: Any
) -> dict[str, jax.ShapeDtypeStruct]:
    def dtype(name: str, tensor: torch.Tensor) -> Any:
        return array_dtype(tensor)

    return abstract_weights(ported, plan, mesh, dtype, **options)


def test_a_stack_is_split_as_its_blocks_are() -> None:
    ported, plan, mesh = planned(tower(count=3))
    found = abstract(ported, plan, mesh)
    assert {n: (s.shape, s.sharding.spec) for n, s in found.items()} == {
        "blocks.*.linear.weight": ((3, 6, 6), PartitionSpec(None, None, "tp")),
        "blocks.*.mix.weight": ((3, 6, 6), PartitionSpec(None, "tp", None)),
        "blocks.*.linear.bias": ((3, 6), PartitionSpec(None)),
        "blocks.*.shift": ((3, 6), PartitionSpec(None)),
        **{f"{n}let.weight": ((6, 6), PartitionSpec()) for n in ("in", "out")},
        **{f"{n}let.bias": ((6,), PartitionSpec()) for n in ("in", "out")},
    }
    # The plan is about what is stored, as without stacks.
    assert set(plan.assignments) == set(ported.names.stored)


def test_blocks_of_a_stack_that_are_split_differently_are_refused() -> None:
    rules = (
        ShardRule(pattern=r"blocks\.[02]\.mix\.weight", spec=("tp", None)),
        ShardRule(pattern=r"blocks\.1\.mix\.weight", spec=(None, "tp")),
        *(rule for rule in RULES if "mix" not in rule.pattern),
    )
    with pytest.raises(ShardingError) as caught:
        abstract(*planned(tower(count=3), rules))
    assert "blocks.1.mix.weight is split by" in str(caught.value)
    assert "blocks.*.mix.weight" in str(caught.value)


def test_a_part_of_a_stack_cannot_be_loaded_by_itself() -> None:
    case = planned(tower(count=3))
    none = abstract(*case, used=lambda name: not name.startswith("blocks."))
    assert "blocks.*.mix.weight" not in none
    assert "inlet.weight" in none
    with pytest.raises(
        PluginError, match=r"blocks\.0\.linear\.weight is loaded and not"
    ):
        abstract(*case, used=lambda name: not name.startswith("blocks.2."))


@pytest.mark.parametrize("gathered", [0, placement.GATHERED_BYTES])
def test_stacks_are_filled_in_whatever_order_tensors_come(
    gathered: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "GATHERED_BYTES", gathered)
    ported, plan, mesh = planned(tower(count=5))
    wanted = abstract(ported, plan, mesh)
    tensors = ported.tensors()
    names = sorted((*ported.names.stored, *ported.names.computed), key=hash)
    stream = ((name, to_numpy(tensors[name])) for name in names)
    found = place_weights(ported, wanted, stream)
    assert set(found) == set(wanted)
    for array, members in ported.arrays.items():
        expected = [to_numpy(tensors[name]) for name in members]
        expected = np.stack(expected) if len(members) > 1 else expected[0]
        np.testing.assert_array_equal(np.asarray(found[array]), expected)
        assert found[array].sharding == wanted[array].sharding


LAYER, COUNT = 2**20, 12


class Wide(torch.nn.Module):
    """Twelve blocks of a MiB each, which is more than is gathered on the host."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.blocks = torch.nn.ModuleList(
                torch.nn.Linear(512, LAYER // 4 // 512, bias=False)
                for _ in range(COUNT)
            )


def test_the_host_holds_a_few_tensors_and_the_devices_each_weight_once() -> None:
    rules = (ShardRule(pattern=r"blocks\.\d+\.weight", spec=("tp", None)),)
    ported, plan, mesh = planned(Wide(), rules)  # type: ignore[arg-type]
    wanted = abstract(ported, plan, mesh)
    alive: list[int] = []
    held: list[int] = []
    seen: list[weakref.ref[Any]] = []
    gc.collect()
    before = sum(a.nbytes for a in jax.live_arrays())

    def stream() -> Iterator[tuple[str, np.ndarray]]:
        for name in ported.names.stored:
            alive.append(sum(ref() is not None for ref in seen))
            held.append(sum(a.nbytes for a in jax.live_arrays()) - before)
            tensor = np.full((512, 512), len(seen), np.float32)
            seen.append(weakref.ref(tensor))
            yield name, tensor

    found = place_weights(ported, wanted, stream())
    (stack,) = found.values()
    assert [float(stack[i, 0, 0]) for i in range(COUNT)] == [*range(COUNT)]
    assert len(alive) == COUNT
    assert max(alive) <= 2
    # From the first tensor on the whole stack is there, and it is there once.
    assert max(held) <= COUNT * LAYER + 2 * LAYER
    assert held[2] >= COUNT * LAYER


def test_a_layer_is_written_into_the_memory_of_its_stack() -> None:
    mesh = build_mesh(MeshSpec(dp=1, tp=2))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(None, "tp"))
    stack = jax.ShapeDtypeStruct((COUNT, 512, 512), jnp.float32, sharding=sharding)
    _, write, one = placement._filling(stack.shape, stack.dtype, sharding)
    layer = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=one)
    memory = write.lower(stack, layer, 0).compile().memory_analysis()
    assert memory.alias_size_in_bytes == COUNT * LAYER // 2
    assert memory.temp_size_in_bytes < LAYER


# ------------------------------------------------------------------ of a checkpoint


def components(folder: Path, mesh: str, dtype: Dtype = Dtype.FLOAT32) -> Components:
    return Components(
        get_port("cogvideox"),
        Checkpoint(folder, str(folder)),
        build_mesh(MeshSpec.parse(mesh)),
        RunSettings(dtype=dtype),
    )


@pytest.mark.parametrize("name", ["text_encoder", "transformer", "vae"])
def test_what_is_abstract_is_what_is_loaded(
    name: str, demo_folder: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(
        demo_folder, bare, ignore=shutil.ignore_patterns("*.safetensors*", "*.model")
    )
    expected = components(demo_folder, "dp=1,tp=2", Dtype.BFLOAT16).load(name)
    found = components(bare, "dp=1,tp=2", Dtype.BFLOAT16).abstract(name)
    assert found.plan == expected.plan
    assert found.replicated == expected.replicated
    assert set(found.weights) == set(expected.weights)
    for key, array in expected.weights.items():
        struct = found.weights[key]
        assert (struct.shape, struct.dtype) == (array.shape, array.dtype)
        assert struct.sharding == array.sharding
    assert any("*" in key for key in found.weights) == (name == "transformer")
    decode = get_port("cogvideox").stage("decode").loads["vae"]
    if name == "vae":
        part = components(bare, "dp=1,tp=2", Dtype.BFLOAT16).abstract(name, decode)
        assert 0 < len(part.weights) < len(found.weights)


MEASURED = """
import json, sys, threading
import torch
from pathlib import Path
from safetensors.torch import save_file
import tests.core.weights.test_placement as own
from tpuport.core.weights import placement
from tpuport.core.programs.components import Components

def resident():
    # What no file backs: pages of the checkpoint's mapping are not memory held.
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024

component = own.components(Path(sys.argv[1]), "dp=1,tp=2")
component.load("text_encoder")
before, highest, done = resident(), 0, threading.Event()
def watch():
    global highest
    while not done.wait(0.002):
        highest = max(highest, resident())
thread = threading.Thread(target=watch)
thread.start()
loaded = component.load("transformer")
done.set()
thread.join()
total = sum(
    shard.data.nbytes for a in loaded.weights.values() for shard in a.addressable_shards
)
print(json.dumps({"total": total, "peak": highest - before}))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_stacked_weights_do_not_double_the_memory_of_loading(
    demo_folder: Path, tmp_path: Path
) -> None:
    from diffusers import CogVideoXTransformer3DModel

    found: list[dict[str, int]] = []
    for layers in (6, 18):
        folder = tmp_path / str(layers)
        shutil.copytree(demo_folder, folder)
        shutil.rmtree(folder / "transformer")
        config = json.loads((demo_folder / "transformer/config.json").read_text())
        config |= {"num_attention_heads": 12, "attention_head_dim": 64}
        module = CogVideoXTransformer3DModel.from_config(
            config | {"num_layers": layers}
        )
        module.save_pretrained(folder / "transformer", max_shard_size="100MB")
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, str(folder)],
            env=os.environ
            | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                "PYTHONPATH": str(ROOT),
                # What is freed goes back to the system, so that it is not counted.
                "MALLOC_MMAP_THRESHOLD_": "65536",
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    # On the CPU the devices' memory is the host's, and the little programs that fill
    # the stacks take some; but twelve layers more take the bytes of twelve layers.
    few, many = found
    more = many["total"] - few["total"]
    assert more > 300e6
    assert many["peak"] - few["peak"] < 1.1 * more
    assert many["peak"] < 1.4 * many["total"]
