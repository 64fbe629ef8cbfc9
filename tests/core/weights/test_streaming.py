"""Weights of stacked blocks that wait in the host's memory: the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.core.heard import Heard
from tests.core.seam.test_blocks import Block, Model, Other
from tests.core.tracing.test_forward_split import Plain, given
from tpuport.core.mesh.device_memory import HOST, array_bytes
from tpuport.core.seam import entry as entries
from tpuport.core.seam import module_weights
from tpuport.core.seam.devices import Devices, TracedProgram
from tpuport.core.seam.ported import seam_of
from tpuport.core.seam.program_runs import TooLargeError
from tpuport.core.weights import streaming
from tpuport.errors import UsageError

REFUSED = "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.90G of 15"


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the weights of small modules wait on the host."""
    monkeypatch.setattr(streaming, "SMALLEST", 1)


def entry_of(ported: torch.nn.Module) -> Any:
    (entry,) = seam_of(ported).entries.values()
    return entry


def waiting(entry: Any) -> set[str]:
    kinds = {name: w.sharding.memory_kind for name, w in entry._weights.items()}
    return {name for name, kind in kinds.items() if kind == HOST}


@torch.no_grad()
@pytest.mark.parametrize(
    "kinds",
    [(Block,) * 4, (Block,) * 5, (Block, Other) * 3, (Block, Block, Other)],
    ids=["even", "odd", "in turn", "one that is alone"],
)
def test_streamed_blocks_give_the_same_bytes(kinds: tuple[type[Block], ...]) -> None:
    model = Model([kind(64) for kind in kinds])
    x = torch.randn(2, 64)
    here = tpuport.port(model, weights_on="chip")
    there = tpuport.port(model, weights_on="host")
    assert torch.equal(there(x), here(x))
    assert not torch.equal(here(x), x)
    assert waiting(entry_of(here)) == set()
    entry = entry_of(there)
    # Vectors stay on the devices, and so does a block that is in no scan.
    stacked = {name for name in entry._weights if "*" in name}
    assert waiting(entry) == {name for name in stacked if name.endswith("weight")}
    assert entry.plan.host_bytes_per_device > 0
    weights = entry._weights.values()
    assert array_bytes(weights) == entry.plan.bytes_per_device
    assert array_bytes(weights, host=True) == entry.plan.host_bytes_per_device


@torch.no_grad()
@pytest.mark.parametrize("mesh", ["sp=4", "dp=2"])
def test_each_device_streams_its_own_part(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpuport.core.weights.gathering.SMALLEST", 1)
    module = Plain()
    inputs = [torch.from_numpy(np.array(x)) for x in given()]
    found = {}
    for place in ("chip", "host"):
        ported = tpuport.port(
            module, mesh=mesh, sharding="gathered", weights_on=place, progress=False
        )
        found[place] = ported(*inputs)
    assert torch.equal(found["host"], found["chip"])
    entry = entry_of(ported)
    (name, *_) = waiting(entry)
    array = entry._weights[name]
    parts = int(mesh[-1])
    assert array.addressable_shards[0].data.size == array.size // parts
    weights = entry._weights.values()
    assert array_bytes(weights, host=True) == entry.plan.host_bytes_per_device


def test_a_module_without_a_scan_has_nothing_to_stream() -> None:
    ported = tpuport.port(Model([Block(64)]), weights_on="host")
    with pytest.raises(UsageError, match="no large blocks that run under one scan"):
        ported(torch.randn(2, 64))


@torch.no_grad()
@pytest.mark.parametrize("room", [1 << 10, 1 << 30], ids=["weights", "program"])
@pytest.mark.parametrize("asked", ["auto", "chip"])
def test_auto_streams_only_what_does_not_fit(
    asked: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights above a chip's memory, or a program that the compiler refuses."""
    compiled = Devices.compiled

    def refusing(self: Devices, program: TracedProgram, seconds: float) -> Any:
        if array_bytes(program.weights.values()) > 1 << 14:
            raise RuntimeError(REFUSED)
        return compiled(self, program, seconds)

    model, x = Model([Block(64) for _ in range(4)]), torch.randn(2, 64)
    expected = tpuport.port(model)(x)
    heard = Heard()
    ported = tpuport.port(model, weights_on=asked, reporter=heard)
    for module in (module_weights, entries):
        monkeypatch.setattr(module, "usable_memory", lambda devices: room)
    monkeypatch.setattr(Devices, "compiled", refusing)
    if asked == "chip":
        with pytest.raises(TooLargeError, match=r"17.90 GiB of a chip.* --weights-on"):
            ported(x)
        return
    assert torch.equal(ported(x), expected)
    assert waiting(entry_of(ported)) == {"blocks.*.linear.weight"}
    (told,) = heard.about("stream")
    assert "of its blocks' weights wait in the host's memory" in told


@torch.no_grad()
def test_auto_leaves_what_fits_on_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (module_weights, entries):
        monkeypatch.setattr(module, "usable_memory", lambda devices: 1 << 30)
    ported = tpuport.port(Model([Block(64) for _ in range(4)]), progress=False)
    ported(torch.randn(2, 64))
    entry = entry_of(ported)
    assert waiting(entry) == set()
    assert entry.waiting
    assert entry.plan.host_bytes_per_device == 0
