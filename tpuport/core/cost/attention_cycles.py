"""Cycles of an attention call on a TPU that is not there.

The call is compiled in a process of its own with the compiler's dump flags, its
schedule is read (:mod:`tpuport.core.cost.kernel_schedule`), and bundles are multiplied
by trip counts. The result is kept in a folder under a key of all that decides it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tpuport.core.cost.attention_case import (
    AttentionCase,
    Blocks,
    kernel_source_hash,
    padded,
    with_blocks,
)
from tpuport.core.cost.kernel_schedule import (
    KernelSchedule,
    dump_flags,
    read_dump,
    reader_hash,
)
from tpuport.core.files.atomic import atomic_write_json, one_line
from tpuport.core.files.sealed_json import canonical
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.slices import (
    TOPOLOGY_NAMES,
    TopologyError,
    compile_environment,
    parse_topology,
)
from tpuport.errors import TpuportError

#: Scores that "bundles per 2^20 scores" are of: a tile of 1024 x 1024.
TILE = 1 << 20
#: Seconds after which a compile is given up; tiles too large for VMEM can take hours
#: until the compiler says so.
TIMEOUT = 600
_PACKAGES = ("jax", "jaxlib", "libtpu", "tokamax")
_FORMAT = 1
#: What makes a cost of a schedule, beside what reads the schedule.
_READERS = tuple(
    Path(__file__).with_name(f"{name}.py")
    for name in ("attention_cycles", "attention_compile")
)


class KernelCostError(TpuportError):
    """A kernel does not compile for the chip, or its schedule cannot be read.

    Attributes:
        refused: whether the kernel itself, or the compiler, refuses the case, so that
            another block size may do; False where something else went wrong.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCost:
    """What an attention call costs by the compiler's schedule.

    Attributes:
        case: the call.
        blocks: tiles of the kernel.
        name: of the kernel in the compiled program.
        grid: steps of one core along each axis.
        program_bundles: length of the kernel's program.
        step_bundles: of one grid step, in the mean over all of them: those that begin
            or finish a row of blocks run more.
        cycles: of the whole call on one core, parts weighed by how often they run.
        utilization: unit -> share of its slots filled during ``cycles``.
        busiest: the unit with the fewest slots to spare.
        spills, fills: stores and loads of a step that serve registers only.
        cores: that share the grid; ``cycles`` is of each.
        other_cycles: the compiler's estimate for the rest of the call: padding,
            transposes, scaling.
        compile_seconds: what the compile took.
        versions: of jax, jaxlib, libtpu (and tokamax).
        source_hash: of tpuport's part of the kernel, if it has one.
    """

    case: AttentionCase
    blocks: Blocks
    name: str
    grid: tuple[int, ...]
    program_bundles: int
    step_bundles: float
    cycles: float
    utilization: dict[str, float]
    busiest: str
    spills: float
    fills: float
    cores: int
    other_cycles: int
    compile_seconds: float
    versions: dict[str, str]
    source_hash: str | None
    regions: list[dict[str, float]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """Grid steps of one core."""
        count = 1
        for size in self.grid:
            count *= size
        return count

    @property
    def padded_scores(self) -> int:
        """Scores the kernel computes, those of padding too, on all cores."""
        return (
            self.case.batch
            * self.case.heads
            * padded(self.case.q_len, self.blocks.q)
            * padded(self.case.kv_len, self.blocks.kv)
        )

    @property
    def bundles_per_tile(self) -> float:
        """Bundles for 2^20 scores that are computed, those of padding among them."""
        return self.cycles * self.cores / self.padded_scores * TILE

    @property
    def cycles_per_tile(self) -> float:
        """Cycles for 2^20 scores that were asked for, in the whole call."""
        return self.cycles * self.cores / self.case.scores * TILE

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> KernelCost:
        """The cost that :meth:`as_dict` wrote."""
        return cls(
            **{
                **data,
                "case": AttentionCase.from_dict(data["case"]),
                "blocks": Blocks(**data["blocks"]),
                "grid": tuple(data["grid"]),
            }
        )


def kernel_cycles(case: AttentionCase, *, cache: Path | None = None) -> KernelCost:
    """Compile an attention call for its chip and read what it costs.

    Args:
        case: the call.
        cache: folder that keeps results; None keeps none.

    Raises:
        TopologyError: libtpu is not installed.
        KernelCostError: the call is refused, or something else went wrong.
    """
    case = with_blocks(case)
    versions = installed_versions(case.implementation)
    key = hashlib.sha256(
        canonical(
            {
                "format": _FORMAT,
                "case": case.as_dict(),
                "versions": versions,
                "source": kernel_source_hash(case.implementation),
                "reader": reader_hash(*_READERS),
            }
        )
    ).hexdigest()
    kept = cache / f"{key}.json" if cache is not None else None
    if kept is not None and kept.is_file():
        return KernelCost.from_dict(json.loads(kept.read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory(prefix="tpuport-kernel-") as folder:
        answer = _compile(case, Path(folder))
        schedules = read_dump(Path(folder), case.chip, only=answer["kernels"])
    cost = _cost(case, answer, schedules, versions)
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_json(kept, cost.as_dict())
    return cost


def installed_versions(implementation: str) -> dict[str, str]:
    """Versions of the packages that decide what is compiled."""
    found = {}
    for package in _PACKAGES:
        if package == "tokamax" and implementation != "tokamax":
            continue
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _compile(case: AttentionCase, folder: Path) -> dict[str, Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise TopologyError(
            "the schedule of a TPU kernel needs libtpu, the TPU compiler, which is not "
            "installed; it exists for Linux on x86-64 only: pip install 'jax[tpu]'"
        )
    name = next(name for name in TOPOLOGY_NAMES if name.startswith(case.chip))
    variables = {
        **compile_environment(parse_topology(name)),
        "LIBTPU_INIT_ARGS": dump_flags(folder),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    # Through env(1): the rest of the environment is handed on unread.
    settings = [f"{name}={value}" for name, value in variables.items()]
    command = [sys.executable, "-m", "tpuport.core.cost.attention_compile"]
    try:
        done = subprocess.run(
            ["env", *settings, *command],
            input=json.dumps(case.as_dict()),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelCostError(
            f"{describe(case)} took more than {TIMEOUT} s to compile", refused=True
        ) from error
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = one_line(done.stderr.strip().splitlines()[-1:] or "no message")
        raise KernelCostError(
            f"compiling {describe(case)} ended with {done.returncode}: {last}"
        )
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise KernelCostError(
            f"{describe(case)} cannot be compiled: {one_line(answer['text'])[:400]}",
            refused=True,
        )
    return answer


def _cost(
    case: AttentionCase,
    answer: dict[str, Any],
    schedules: dict[str, KernelSchedule],
    versions: dict[str, str],
) -> KernelCost:

    names = [name for name in answer["kernels"] if name in schedules]
    if len(names) != 1:
        raise KernelCostError(
            f"{describe(case)} was compiled to {len(names)} kernels "
            f"({', '.join(answer['kernels']) or 'none'}); one is expected"
        )
    schedule = schedules[names[0]]
    # Of what stays open, the dearest way.
    way = schedule.executions(scalars=_operands(case))[-1]
    grid = way.grid
    steps = math.prod(grid)
    assert case.blocks is not None  # chosen by kernel_cycles
    # Two cores share a grid where one of its axes lets them.
    cores = chip(case.chip).cores
    if cores > 1 and tuple(grid) in map(tuple, answer["grids"]):
        cores = 1
    return KernelCost(
        case=case,
        blocks=case.blocks,
        name=names[0],
        grid=grid,
        program_bundles=schedule.bundles,
        step_bundles=way.cycles / steps,
        cycles=way.cycles,
        utilization=way.utilization,
        busiest=way.busiest,
        spills=way.used["VSTORE:SPILL"] / steps,
        fills=way.used["VLOAD:FILL"] / steps,
        cores=cores,
        other_cycles=answer["other_cycles"],
        compile_seconds=answer["compile_seconds"],
        versions=versions,
        source_hash=kernel_source_hash(case.implementation),
        regions=[asdict(region) for region in way.regions],
    )


def _operands(case: AttentionCase) -> dict[int, int]:
    """What the kernel's scalar operands hold, by position.

    The kernel of tpuport is given the keys that count. What others are given is left
    open.
    """
    if case.implementation != "tpuport":
        return {}
    return {0: case.kv_len}


def describe(case: AttentionCase) -> str:
    """A case in a few words."""
    blocks = f", blocks {case.blocks}" if case.blocks else ""
    return (
        f"{case.implementation} attention, {case.heads} heads of {case.head_dim}, "
        f"{case.q_len} x {case.kv_len} for {case.chip}{blocks}"
    )
