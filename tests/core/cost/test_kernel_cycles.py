"""What is kept of kernels' schedules, and when they are read anew; nothing compiles."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.core.cost.programs import LOOPS
from tpuport.core.cost import kernel_cycles as kernels
from tpuport.core.cost.hlo import Instruction, parse
from tpuport.core.cost.kernel_cycles import (
    KernelError,
    KernelsMet,
    keep_schedules,
)
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.slices import parse_topology, smallest_of

PROGRAM = parse(LOOPS).computations["main"]
CALL, OPERANDS = PROGRAM["kernel.1"], [PROGRAM["x"], PROGRAM["x"]]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The requests that a kernel was compiled for; each takes 1000 cycles more."""
    requests: list[dict[str, Any]] = []

    def write(folder: Path, chip: str, what: str) -> None:
        requests.append(json.loads((folder / "request.json").read_text()))
        cost = {
            "cycles": 1000 * len(requests),
            "utilization": {"MXU": 0.5},
            "busiest": "MXU",
            "conditions": [],
        }
        (folder / "cost.json").write_text(json.dumps(cost))

    monkeypatch.setattr(kernels, "_run_worker", write)
    return requests


def cycles(cache: Path, name: str = "v6e", call: Instruction = CALL) -> float:
    """Of the kernel, as a process would find it that has just begun."""
    return KernelsMet(chip(name), cache)(call, OPERANDS).cycles


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
    monkeypatch.setattr(kernels, "reader_hash", lambda: "one reader")
    assert cycles(tmp_path) == cycles(tmp_path) == 1000
    monkeypatch.setattr(kernels, "reader_hash", lambda: "another")
    assert cycles(tmp_path) == 2000


@pytest.mark.parametrize("name", kernels._READERS)
def test_the_hash_of_the_readers_is_of_each_of_them(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Path(kernels.__file__)
    for reader in kernels._READERS:
        copy = tmp_path / f"{reader}.py"
        copy.write_bytes(source.with_name(copy.name).read_bytes())
    monkeypatch.setattr(kernels, "__file__", str(tmp_path / "kernel_cycles.py"))
    before = kernels.reader_hash()
    assert before == kernels.reader_hash()
    with (tmp_path / f"{name}.py").open("a") as file:
        file.write("# otherwise\n")
    assert kernels.reader_hash() != before


def test_each_stage_has_the_kernels_that_it_calls(
    compiled: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Of one planner, whose meshes and stages call different ones."""
    first, second = (KernelsMet(chip("v6e"), tmp_path / "cache") for _ in range(2))
    assert first(CALL, OPERANDS).cycles == first(CALL, OPERANDS).cycles == 1000
    assert second(CALL, OPERANDS[:1]).cycles == 2000
    assert [use.cycles for use in first.uses.values()] == [1000]
    assert [use.cycles for use in second.uses.values()] == [2000]
    names = keep_schedules(second.uses.values(), tmp_path / "dump")
    assert [path.name for path in (tmp_path / "dump").iterdir()] == names
    (use,) = second.uses.values()
    assert names == [f"kernel-{use.key[:8]}"]


def test_a_kernel_by_itself_may_take_what_it_may_in_its_program(
    compiled: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Its limit of VMEM, wherever that lies there; the compiler's own is less."""
    limit = {"memory_space": "1", "offset": "2621440", "size": "117440512"}
    text = json.dumps({**CALL.config, "scoped_memory_configs": [limit]})
    cycles(tmp_path, call=replace(CALL, attributes=f"backend_config={text}"))
    cycles(tmp_path)
    assert [request["scoped"] for request in compiled] == [
        [{"memory_space": "1", "offset": "0", "size": "117440512"}],
        [],
    ]


@pytest.mark.parametrize(
    ("program", "refused", "said"),
    [
        (
            "open(argv[-1] + '/refused.txt', 'w').write('too\\n large')",
            True,
            "too large",
        ),
        ("sys.exit('one\\ntwo')", False, "compiling kernel k ended with 1: two"),
    ],
)
def test_a_failed_compile_is_told_by_what_happened(
    program: str,
    refused: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = subprocess.run

    def instead(command: list[str], **options: Any) -> Any:
        code = f"import sys; argv = sys.argv; {program}"
        return run([sys.executable, "-c", code, *command], **options)

    monkeypatch.setattr(subprocess, "run", instead)
    with pytest.raises(KernelError, match=said) as caught:
        kernels._run_worker(tmp_path, "v6e", "kernel k")
    assert caught.value.refused == refused
