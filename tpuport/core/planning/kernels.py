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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.core.planning.account import MXU, VECTOR, KernelCost
from tpuport.core.planning.hlo import Array, Instruction
from tpuport.core.schedule import dump_flags
from tpuport.errors import TpuportError

if TYPE_CHECKING:
    from tpuport.core.schedule import Execution
    from tpuport.core.topology import Topology

#: Raised when the meaning of what is kept on disk changes.
_FORMAT = 2
_TIMEOUT_SECONDS = 560
_MATRIX_UNIT = "MXU"

#: Share of the dearest way's cycles below which a kernel is taken to have skipped its
#: work; see :func:`usual`.
WORKS = 0.25


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
    """The costs of kernels for one topology.

    Args:
        topology: whose chip they are compiled for.
        cache: where schedules are kept.
        environment: variables of the compiling process; see
            :func:`tpuport.core.topology.compile_environment`.
        flops_per_cycle: of the chip, for the MXU's share as FLOPs.
        say: told before a kernel is compiled.
    """

    def __init__(
        self,
        topology: Topology,
        cache: Path,
        *,
        environment: Mapping[str, str],
        flops_per_cycle: float,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._topology = topology
        self._cache = cache
        self._environment = environment
        self._flops_per_cycle = flops_per_cycle
        self._say = say
        self.uses: dict[str, KernelUse] = {}

    def __call__(
        self, instruction: Instruction, operands: Sequence[Instruction]
    ) -> KernelCost:
        """What one call of a custom call takes.

        Raises:
            KernelError: it does not compile by itself, or its schedule is not read.
        """
        request = self._request(instruction, operands)
        text = json.dumps(request, sort_keys=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        if key not in self.uses:
            folder = self._cache / key
            if not (folder / "cost.json").is_file():
                self._compile(text, folder, instruction.name)
            self.uses[key] = self._read(key, folder, instruction.name)
        return self.uses[key].cost

    def _request(
        self, instruction: Instruction, operands: Sequence[Instruction]
    ) -> dict[str, Any]:
        """All that the kernel's schedule depends on."""
        return {
            "format": _FORMAT,
            "libtpu": version("libtpu"),
            "topology": self._topology.name,
            "config": instruction.config["custom_call_config"],
            "operands": [_listed(a) for o in operands for a in o.arrays],
            "results": [_listed(a) for a in instruction.arrays],
        }

    def _compile(self, request: str, folder: Path, name: str) -> None:
        self._say(f"reading the schedule of kernel {name}")
        self._cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self._cache) as temporary:
            work = Path(temporary) / "kernel"
            (work / "schedule").mkdir(parents=True)
            (work / "request.json").write_text(request)
            variables = {
                **self._environment,
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
                "tpuport.core.planning.kernel_worker",
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
                raise KernelError(f"kernel {name} by itself: {lines[-1]}")
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
                flops=busy * cycles * self._flops_per_cycle,
            ),
            utilization=utilization,
            folder=folder,
            conditions=tuple(found["conditions"]),
        )

    def keep(self, folder: Path) -> list[str]:
        """Copy the schedules of all kernels met so far; returns the folder names."""
        names = []
        for use in self.uses.values():
            name = f"{use.name}-{use.key[:8]}"
            shutil.copytree(use.folder, folder / name, dirs_exist_ok=True)
            names.append(name)
        return names


def usual(ways: Sequence[Execution]) -> Execution:
    """The way that a call is taken to go, of all that its data may make it go.

    The dearest one: a mask in the data skips nothing. A flag in the data (what is
    compared with 0 for equality) is taken as off, though, as long as the kernel still
    does its work then: flags ask for a slower, more careful program.
    """
    dearest = max(ways, key=lambda way: way.cycles)
    plain = [
        way
        for way in ways
        if all(holds for text, holds in way.conditions if text.endswith(" eq 0"))
    ]
    if not plain:
        return dearest
    found = max(plain, key=lambda way: way.cycles)
    return found if found.cycles >= WORKS * dearest.cycles else dearest


def _listed(array: Array) -> list[Any]:
    return [array.dtype, list(array.shape)]
