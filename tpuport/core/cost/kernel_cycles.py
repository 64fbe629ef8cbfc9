"""What the Pallas kernels of a compiled program take, from their own schedules.

The compiler estimates nothing for a kernel. Each distinct one is compiled once more by
itself, in a process whose libtpu writes schedules down, and its cycles are counted from
the bundles and the trip counts of its loops. Results are kept on disk.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tpuport.core.cost.account import MXU, VECTOR, KernelCost
from tpuport.core.cost.hlo import Array, Instruction
from tpuport.core.cost.kernel_schedule import Execution, dump_flags, reader_hash
from tpuport.core.mesh.chips import Chip
from tpuport.core.mesh.slices import compile_environment, smallest_of
from tpuport.core.reports import Reporter
from tpuport.errors import TpuportError

#: Raised when the meaning of what is kept on disk changes.
_FORMAT = 3
#: What makes a cost of a schedule, beside what reads the schedule.
_READERS = tuple(
    Path(__file__).with_name(f"{name}.py")
    for name in ("kernel_cycles", "kernel_worker")
)
_TIMEOUT_SECONDS = 560
_MATRIX_UNIT = "MXU"


class KernelError(TpuportError):
    """The schedule of a kernel could not be had."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelUse:
    """A kernel as a program calls it.

    Attributes:
        key: of its code, its shapes, the chip and the compiler.
        name: in the program.
        cost: of one call.
        utilization: unit -> share of its slots that is filled.
        folder: where its schedule is kept.
        conditions: on data, as assumed by :func:`usual`.
    """

    key: str
    name: str
    cost: KernelCost
    utilization: Mapping[str, float]
    folder: Path
    conditions: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "key": self.key,
            "name": self.name,
            "cycles": self.cost.cycles,
            "bound": self.cost.bound,
            "utilization": dict(self.utilization),
            "conditions": list(self.conditions),
        }


class KernelCosts:
    """The costs of kernels for one chip.

    Each is read once; :class:`KernelsMet` keeps which of them a stage calls.

    Args:
        chip: what they are compiled for.
        cache: where schedules are kept.
        reporter: told while a kernel is compiled.
    """

    def __init__(
        self,
        chip: Chip,
        cache: Path,
        *,
        reporter: Reporter | None = None,
    ) -> None:
        self._chip = chip
        self._cache = cache
        self._reporter = reporter or Reporter()
        self._known: dict[str, KernelUse] = {}

    def use(
        self, instruction: Instruction, operands: Sequence[Instruction]
    ) -> KernelUse:
        """A custom call, and what one call of it takes.

        Raises:
            KernelError: it does not compile by itself, or its schedule is not read.
        """
        request = self._request(instruction, operands)
        text = json.dumps(request, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        if key not in self._known:
            folder = self._cache / key
            if not (folder / "cost.json").is_file():
                what = f"reading the schedule of kernel {instruction.name}"
                with self._reporter.timed(what):
                    self._compile(text, folder, instruction.name)
            self._known[key] = self._read(key, folder, instruction.name)
        return self._known[key]

    def _request(
        self, instruction: Instruction, operands: Sequence[Instruction]
    ) -> dict[str, Any]:
        """All that the kernel's schedule, and what is read in it, depend on."""
        return {
            "format": _FORMAT,
            "libtpu": version("libtpu"),
            "chip": self._chip.name,
            "reader": reader_hash(*_READERS),
            "config": instruction.config["custom_call_config"],
            "scoped": _scoped(instruction.config),
            "operands": [_listed(a) for o in operands for a in o.arrays],
            "results": [_listed(a) for a in instruction.arrays],
        }

    def _compile(self, request: str, folder: Path, name: str) -> None:
        self._cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._cache) as temporary:
            work = Path(temporary) / "kernel"
            (work / "schedule").mkdir(parents=True)
            (work / "request.json").write_text(request)
            variables = {
                **compile_environment(smallest_of(self._chip.name)),
                "LIBTPU_INIT_ARGS": dump_flags(work / "schedule"),
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            }
            # env(1) adds to what this process was started with.
            command = [
                "env",
                *(f"{name}={value}" for name, value in variables.items()),
                sys.executable,
                "-m",
                "tpuport.core.cost.kernel_worker",
                str(work),
            ]
            try:
                done = subprocess.run(
                    command,
                    capture_output=True,
                    text=True,
                    timeout=_TIMEOUT_SECONDS,
                    check=False,
                )
            except (OSError, subprocess.TimeoutExpired) as error:
                raise KernelError(f"kernel {name} was not compiled: {error}") from error
            if done.returncode or not (work / "cost.json").is_file():
                lines = done.stderr.strip().splitlines() or ["no message"]
                raise KernelError(f"kernel {name} by itself: {_reason(lines)}")
            try:
                os.replace(work, folder)
            except OSError:
                # Another process may have kept the same schedule meanwhile.
                if not (folder / "cost.json").is_file():
                    raise

    def _read(self, key: str, folder: Path, name: str) -> KernelUse:
        found = json.loads((folder / "cost.json").read_text())
        utilization = found["utilization"]
        cycles = float(found["cycles"])
        busy = utilization.get(_MATRIX_UNIT, 0.0)
        return KernelUse(
            key=key,
            name=re.sub(r"[.\d]+$", "", name),
            cost=KernelCost(
                cycles=cycles,
                bound=MXU if found["busiest"] == _MATRIX_UNIT else VECTOR,
                flops=busy * cycles * self._chip.flops_per_cycle,
            ),
            utilization=utilization,
            folder=folder,
            conditions=tuple(found["conditions"]),
        )


class KernelsMet:
    """The costs of kernels, and a note of those that were asked for.

    Attributes:
        uses: by key, in the order in which they were met.
    """

    def __init__(self, costs: KernelCosts) -> None:
        self._costs = costs
        self.uses: dict[str, KernelUse] = {}

    def __call__(
        self, instruction: Instruction, operands: Sequence[Instruction]
    ) -> KernelCost:
        """What one call takes; see :meth:`KernelCosts.use`."""
        use = self._costs.use(instruction, operands)
        return self.uses.setdefault(use.key, use).cost


def keep_schedules(uses: Iterable[KernelUse], folder: Path) -> list[str]:
    """Copy the schedules of some kernels; returns the names of their folders."""
    names = []
    for use in uses:
        name = f"{use.name}-{use.key[:8]}"
        shutil.copytree(use.folder, folder / name, dirs_exist_ok=True)
        names.append(name)
    return names


def usual(ways: Sequence[Execution]) -> Execution:
    """The way that a call is taken to go, of all that its data may make it go.

    The dearest one: what is in the data skips nothing.
    """
    return max(ways, key=lambda way: way.cycles)


def _listed(array: Array) -> list[Any]:
    return [array.dtype, list(array.shape)]


def _scoped(config: Mapping[str, Any]) -> list[dict[str, str]]:
    """What a kernel may take of each memory, wherever that lies in its program.

    Without it a kernel by itself has the compiler's default, which is less.
    """
    return [
        {**given, "offset": "0"} for given in config.get("scoped_memory_configs", ())
    ]


def _reason(lines: Sequence[str]) -> str:
    """The line of a traceback that says what happened; links may follow it."""
    said = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return said[-1] if said else lines[-1]
