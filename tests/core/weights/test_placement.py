"""Weights on their shards: where stacks go, and what the host holds on the way."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec
from safetensors.torch import load_file, save_file

from tests.core.tracing.towers import tower
from tests.patches.tools import model_runtime
from tpuport.core.arrays import to_numpy
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.tracing.block_stacks import Stack
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights import placement
from tpuport.core.weights.file_parts import Index
from tpuport.core.weights.placement import abstract_weights, place_weights
from tpuport.core.weights.sharding import ShardingPlan, ShardRule, plan_sharding
from tpuport.core.weights.stored_tensors import unread
from tpuport.errors import ShardingError, StoreError

RULES = (
    ShardRule(pattern=r"blocks\.\d+\.linear\.weight", spec=(None, "tp")),
    ShardRule(pattern=r"blocks\.\d+\.mix\.weight", spec=("tp", None)),
    ShardRule(pattern=r"blocks\.\d+\.linear\.bias", spec=()),
    ShardRule(pattern=r"(in|out)let\..*", spec=()),
)


def planned(
    module: Any, rules: tuple[ShardRule, ...] = RULES, stacks: Any = None
) -> tuple[PortedModule, ShardingPlan, Any]:
    mesh = build_mesh(MeshSpec(dp=1, tp=2))
    if stacks is None:
        stacks = (Stack("blocks", 0, tuple(module.blocks)),)
    ported = PortedModule(module, model_runtime(mesh=mesh, platform="cpu"), stacks)
    stored = dict(module.state_dict())
    plan = plan_sharding(rules, stored, dict(mesh.shape), component="tower")
    return ported, plan, mesh


def test_a_stack_is_split_as_its_blocks_are() -> None:
    ported, plan, mesh = planned(tower(count=3))
    found = abstract_weights(ported, plan, mesh)
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
        abstract_weights(*planned(tower(count=3), rules))
    assert "blocks.1.mix.weight is split by" in str(caught.value)
    assert "blocks.*.mix.weight" in str(caught.value)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("gathered", [0, placement.GATHERED_BYTES])
def test_each_part_is_read_once_and_is_where_it_belongs(
    gathered: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "GATHERED_BYTES", gathered)
    ported, plan, mesh = planned(tower(count=5))
    wanted = abstract_weights(ported, plan, mesh)
    tensors = ported.tensors()
    asked: list[Any] = []

    def read(name: str, index: Index) -> np.ndarray:
        asked.append((name, str(index)))
        return to_numpy(tensors[name][index].clone())

    found = place_weights(ported, wanted, read, ahead=ahead)
    assert set(found) == set(wanted)
    assert len(set(asked)) == len(asked)
    # Of two halves each is read, of what every device holds the whole.
    halves = {n for n in tensors if re.search(r"linear\.weight|mix", n)}
    assert Counter(n for n, _ in asked) == {n: 1 + (n in halves) for n in tensors}
    for array, members in ported.arrays.items():
        expected = [to_numpy(tensors[name]) for name in members]
        expected = np.stack(expected) if len(members) > 1 else expected[0]
        np.testing.assert_array_equal(np.asarray(found[array]), expected)
        assert found[array].sharding == wanted[array].sharding


def test_parts_are_read_ahead_up_to_a_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight at a time, fewer where they are large; an error ends all."""
    ported, plan, mesh = planned(tower(count=5))
    wanted = abstract_weights(ported, plan, mesh)
    tensors, most, lock = ported.tensors(), [0], threading.Lock()
    under_way = set[int]()
    together = threading.Barrier(placement.IN_FLIGHT)

    def read(name: str, index: Index) -> np.ndarray:
        with lock:
            under_way.add(threading.get_ident())
            most.append(len(under_way))
        with contextlib.suppress(threading.BrokenBarrierError):
            together.wait(0.2)
        with lock:
            under_way.remove(threading.get_ident())
        return to_numpy(tensors[name][index].clone())

    place_weights(ported, wanted, read, ahead=True)
    assert max(most) == placement.IN_FLIGHT
    assert not together.broken or len(most) > placement.IN_FLIGHT
    monkeypatch.setattr(placement, "AHEAD_BYTES", 0)
    together.abort()
    most.clear()
    place_weights(ported, wanted, read, ahead=True)
    assert max(most) == 1

    def breaks(name: str, index: Index) -> np.ndarray:
        raise StoreError("the store is gone")

    with pytest.raises(StoreError, match="the store is gone"):
        place_weights(ported, wanted, breaks, ahead=True)


def test_bytes_that_are_read_ahead_are_those_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of float32 has twice the bytes of the weights in bfloat16."""
    module = torch.nn.ModuleList(torch.nn.Linear(6, 6, bias=False) for _ in range(9))
    save_file(module.state_dict(), tmp_path / "w.safetensors")
    with unread("x"):
        found = load_file(tmp_path / "w.safetensors")
    halves = {name: one.to(torch.bfloat16) for name, one in found.items()}
    module.load_state_dict(halves, assign=True)
    ported, plan, mesh = planned(module, (ShardRule(pattern=".*", spec=()),), stacks=())
    monkeypatch.setattr(placement, "AHEAD_BYTES", 4 * 6 * 6)  # of one tensor
    begun: list[int] = []
    more = threading.Condition()

    def read(name: str, index: Index) -> np.ndarray:
        with more:
            begun.append(0)
            more.notify_all()
            if len(begun) == 1:
                more.wait_for(lambda: len(begun) > 3, 0.3)
                begun[0] = len(begun)
        return np.zeros((6, 6), jnp.bfloat16)

    place_weights(ported, abstract_weights(ported, plan, mesh), read, ahead=True)
    # The next one, one ahead, and one that reaches beyond.
    assert 1 <= begun[0] <= 3
    assert len(begun) == 9


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
    ported, plan, mesh = planned(Wide(), rules)
    wanted = abstract_weights(ported, plan, mesh)
    alive: list[int] = []
    held: list[int] = []

    def bytes_held() -> int:
        """Of arrays like these: other tests' may go meanwhile."""
        return sum(a.nbytes for a in jax.live_arrays() if a.shape[-2:] == (512, 512))

    gc.collect()
    before = bytes_held()

    seen: dict[str, list[weakref.ref[Any]]] = {}

    def read(name: str, index: Index) -> np.ndarray:
        if name not in seen:
            refs = [ref for refs in seen.values() for ref in refs]
            alive.append(sum(ref() is not None for ref in refs))
            held.append(bytes_held() - before)
            seen[name] = []
        tensor = np.full((256, 512), len(seen) - 1, np.float32)
        seen[name].append(weakref.ref(tensor))
        return tensor

    for _ in range(50):  # the devices may be slower than the host at times
        (stack,) = place_weights(ported, wanted, read).values()
        assert [float(i) for i in stack[:, 0, 0]] == [*range(COUNT)]
        assert len(alive) == COUNT
        assert max(alive) <= 2 * 2  # two tensors, in halves
        seen.clear()
        # From the first tensor on the whole stack is there, and it is there once.
        assert max(held) <= COUNT * LAYER + 2 * LAYER
        assert held[2] >= COUNT * LAYER
        alive.clear()
        held.clear()
        del stack


def test_a_layer_is_written_into_the_memory_of_its_stack() -> None:
    mesh = build_mesh(MeshSpec(dp=1, tp=2))
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(None, "tp"))
    stack = jax.ShapeDtypeStruct((COUNT, 512, 512), jnp.float32, sharding=sharding)
    _, write = placement._filling(stack.shape, stack.dtype, sharding)
    one = jax.sharding.NamedSharding(mesh, PartitionSpec("tp"))
    layer = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=one)
    memory = write.lower(stack, layer, 0).compile().memory_analysis()
    assert memory.alias_size_in_bytes == COUNT * LAYER // 2
    assert memory.temp_size_in_bytes < LAYER
