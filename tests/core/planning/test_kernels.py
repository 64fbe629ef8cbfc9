"""What is kept of kernels' schedules, and when they are read anew; nothing compiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.core.planning.programs import LOOPS
from tpuport.core import schedule
from tpuport.core.chips import chip
from tpuport.core.planning import kernels
from tpuport.core.planning.hlo import Instruction, parse
from tpuport.core.planning.kernels import KernelCosts, KernelsMet, keep_schedules
from tpuport.core.topology import parse_topology, smallest_of

READERS = ("bundles", "scalar_logic", "schedule")
PROGRAM = parse(LOOPS).computations["main"].by_name()
CALL, OPERANDS = PROGRAM["kernel.1"], [PROGRAM["x"], PROGRAM["x"]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests that a kernel was compiled for; each takes 1000 cycles more."""
    requests: list[dict[str, Any]] = []

    def write(self: KernelCosts, request: str, folder: Path, name: str) -> None:
        requests.append(json.loads(request))
        folder.mkdir(parents=True)
        cost = {
            "cycles": 1000 * len(requests),
            "utilization": {"MXU": 0.5},
            "busiest": "MXU",
            "conditions": [],
        }
        (folder / "cost.json").write_text(json.dumps(cost))

    monkeypatch.setattr(KernelCosts, "_compile", write)
    return requests


def cycles(cache: Path, name: str = "v6e", call: Instruction = CALL) -> float:
    """Of the kernel, as a process would find it that has just begun."""
    return KernelCosts(chip(name), cache).use(call, OPERANDS).cost.cycles


def test_a_schedule_is_kept_for_all_slices_of_a_chip(
    compiled: list[dict[str, Any]], tmp_path: Path
) -> None:
    assert cycles(tmp_path) == cycles(tmp_path) == 1000
    assert cycles(tmp_path, "v5e") == 2000
    assert [request["chip"] for request in compiled] == ["v6e", "v5e"]
    # Nothing else of a slice decides it.
    assert not any("v6e-" in str(value) for value in compiled[0].values())
    assert smallest_of("v6e") == parse_topology("v6e-1")


def test_what_reads_schedules_decides_what_is_kept(
    compiled: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "reader_hash", lambda *more: "one reader")
    assert cycles(tmp_path) == cycles(tmp_path) == 1000
    monkeypatch.setattr(kernels, "reader_hash", lambda *more: "another")
    assert cycles(tmp_path) == 2000


@pytest.mark.parametrize("name", [*READERS, "more"])
def test_the_hash_of_the_readers_is_of_each_of_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(schedule.__file__)
    for reader in READERS:
        copy = tmp_path / f"{reader}.py"
        copy.write_bytes(source.with_name(copy.name).read_bytes())
    more = tmp_path / "more.py"
    more.write_text("usual = max")
    monkeypatch.setattr(schedule, "__file__", str(tmp_path / "schedule.py"))
    before = schedule.reader_hash(more)
    assert before == schedule.reader_hash(more)
    with (tmp_path / f"{name}.py").open("a") as file:
        file.write("# otherwise\n")
    assert schedule.reader_hash(more) != before


def test_the_way_that_is_usual_is_part_of_the_reader() -> None:
    found = {path.name for path in kernels._READERS}
    assert found == {"kernels.py", "kernel_worker.py"}
    assert all(path.is_file() for path in kernels._READERS)
    assert Path(kernels.usual.__code__.co_filename).name in found


def test_each_stage_has_the_kernels_that_it_calls(
    compiled: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Of one planner, whose meshes and stages call different ones."""
    costs = KernelCosts(chip("v6e"), tmp_path / "cache")
    first, second = KernelsMet(costs), KernelsMet(costs)
    assert first(CALL, OPERANDS).cycles == first(CALL, OPERANDS).cycles == 1000
    assert second(CALL, OPERANDS[:1]).cycles == 2000
    assert [use.cost.cycles for use in first.uses.values()] == [1000]
    assert [use.cost.cycles for use in second.uses.values()] == [2000]
    names = keep_schedules(second.uses.values(), tmp_path / "dump")
    assert [path.name for path in (tmp_path / "dump").iterdir()] == names
    (use,) = second.uses.values()
    assert names == [f"kernel-{use.key[:8]}"]
