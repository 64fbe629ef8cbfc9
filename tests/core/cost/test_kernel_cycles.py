"""What is kept of kernels' schedules, and when they are read anew; nothing compiles."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.core.cost.programs import LOOPS
from tests.core.plan.test_search import REQUEST, measured
from tpuport.core.cost import kernel_cycles as kernels
from tpuport.core.cost.hlo import Instruction, parse
from tpuport.core.cost.kernel_cycles import (
    KernelError,
    KernelsMet,
    keep_schedules,
)
from tpuport.core.cost.kernel_worker import usual
from tpuport.core.enums import Dtype
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import parse_topology, smallest_of
from tpuport.core.plan import planner
from tpuport.core.plan.plan import Plan
from tpuport.core.plan.planner import Planner
from tpuport.core.spec.request import Request
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.tiling import TilingDecision

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


def test_the_way_that_is_usual_is_part_of_the_reader() -> None:
    assert Path(usual.__code__.co_filename).stem in kernels._READERS


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


class Small(Planner):
    """A planner whose programs call the kernel with some of its operands."""

    calls: ClassVar[dict[tuple[str, str], int]] = {
        ("dp=4,sp=1,tp=1", "denoise"): 1,
        ("dp=1,sp=1,tp=4", "denoise"): 2,
        ("dp=1,sp=1,tp=4", "decode"): 0,
    }
    #: Of decode in tiles.
    small: ClassVar[int] = 1

    def __post_init__(self) -> None:
        self.say = self.reporter.say
        self.chip, self.devices = chip("v6e"), [None] * 4
        self._tiling, self.written = {}, []

    def check_mesh(self, spec: MeshSpec) -> None:
        assert spec.size == 4

    def request(self, spec: MeshSpec) -> Request:
        return REQUEST

    def sharding_plans(self, spec: MeshSpec) -> tuple[Any, ...]:
        return ()

    def _flags(self, stages: Any) -> tuple[str, ...]:
        return ()

    def programs(self, spec: MeshSpec, request: Any, stages: Any) -> Any:
        for stage in stages:
            count = self.calls[str(spec), stage]
            asked = SimpleNamespace(stage=stage, label=f"{stage}/run")
            one = {"asked": asked, "forget": lambda: None}
            if stage == "denoise":
                yield SimpleNamespace(**one, count=count, size=10.0, tiling=None)
                continue
            tiling = TilingDecision(stage=stage, asked="auto", tiles="2 tiles")
            yield SimpleNamespace(**one, count=count, size=40.0, tiling=tiling)
            tiling = replace(tiling, tiled=True)
            yield SimpleNamespace(**one, count=self.small, size=4.0, tiling=tiling)
            self._tiling[stage] = tiling


@pytest.fixture
def small(
    compiled: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Small:
    def compiles(program: Any, *where: Any, keep_text: bool) -> Any:
        where[-1](CALL, OPERANDS[: program.count])
        hlo = "HloModule" if keep_text else ""
        return measured(program.size, 0.5, stage=program.asked.stage, hlo=hlo)

    monkeypatch.setattr(planner, "measure", compiles)
    monkeypatch.setattr(planner, "choices", lambda port: {})
    known: Any = {
        "port": SimpleNamespace(name="m", blocks="native"),
        "variant": SimpleNamespace(name="v"),
        "checkpoint": SimpleNamespace(source="w"),
        "topology": parse_topology("v6e-4"),
        "ask": None,
    }
    return Small(
        **known,
        settings=RunSettings(dtype=Dtype.BFLOAT16),
        cache=tmp_path / "cache",
        dump=tmp_path / "dump",
    )


def told(plan: Plan) -> list[float]:
    """The cycles of the kernels of a plan, and that its files have them."""
    names = {f"{use['name']}-{use['key'][:8]}" for use in plan.kernels}
    assert names <= set(plan.files)
    return [use["cycles"] for use in plan.kernels]


def test_a_plan_has_the_kernels_of_its_own_mesh(small: Small, tmp_path: Path) -> None:
    first = small.plan(MeshSpec(dp=4), stages=["denoise"])
    second = small.plan(MeshSpec(tp=4), stages=["denoise"])
    assert (told(first), told(second)) == ([1000.0], [2000.0])
    assert len(first.files) == len(second.files) == 3
    # Of a search the dump has all that was compiled, and that is known, too.
    assert {path.name for path in (tmp_path / "dump").iterdir()} == set(small.written)
    assert set(small.written) == {*first.files, *second.files}
    assert len(small.written) == 6


def test_what_is_tried_only_leaves_nothing_in_the_dump(
    small: Small, tmp_path: Path
) -> None:
    plan = small.plan(MeshSpec(dp=4), stages=["denoise"], keep=False)
    assert [use["cycles"] for use in plan.kernels] == [1000.0]
    assert plan.files == small.written == []
    assert not (tmp_path / "dump").exists()


def test_a_stage_in_tiles_has_its_own_kernels_beside_those_of_the_others(
    small: Small, tmp_path: Path
) -> None:
    plan = small.plan(MeshSpec(tp=4), stages=["denoise", "decode"])
    assert plan.fits
    # 2000 are of decode untiled, which does not run.
    assert told(plan) == [1000.0, 3000.0]
    assert {path.name for path in (tmp_path / "dump").iterdir()} == set(small.written)


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
