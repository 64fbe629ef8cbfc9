"""What the Pallas kernels of a compiled program take, from their own schedules.

The compiler estimates nothing for a kernel. Each distinct kernel is compiled once more
by itself, in a process whose libtpu writes schedules down (libtpu reads its flags
once). Its cycles are counted from the bundles and the trip counts of its loops. The
result is kept on disk under a hash of all that decides it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpuport.core.cost.hlo import Instruction
from tpuport.core.cost.kernel_schedule import dump_flags
from tpuport.core.cost.program_time import MXU, VECTOR, KernelCost
from tpuport.core.files.atomic import one_line, scratch_folder
from tpuport.core.mesh.chips import Chip
from tpuport.core.mesh.slices import check_libtpu, compile_environment, smallest_of
from tpuport.core.reports import Reporter
from tpuport.errors import TpuportError

#: Raised when the meaning of what is kept on disk changes.
_FORMAT = 4
#: The modules beside this one that make a cost of a kernel.
_READERS = ("bundles", "expressions", "kernel_schedule", "kernel_worker")
#: After which a compile is given up; tiles too large for VMEM can take hours until the
#: compiler says so.
_TIMEOUT_SECONDS = 600
_MATRIX_UNIT = "MXU"


class KernelError(TpuportError):
    """The schedule of a kernel could not be had.

    Attributes:
        refused: whether the kernel itself, or the compiler, refuses it, so that another
            block size may do; False where something else went wrong.
    """

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelUse(KernelCost):
    """A kernel as a program calls it.

    Attributes:
        name: in the program.
        utilization: unit -> share of its slots that is filled.
        folder: where its schedule is kept; named by the hash of its code, its shapes,
            the chip and the compiler.
        conditions: on data, as assumed: of all ways a kernel may go the dearest.
    """

    name: str
    utilization: Mapping[str, float]
    folder: Path
    conditions: tuple[str, ...]

    @property
    def key(self) -> str:
        """The hash of all that decides the kernel's cost."""
        return self.folder.name

    def as_dict(self) -> dict[str, Any]:
        return {
            "key": self.key,
            "name": self.name,
            "cycles": self.cycles,
            "bound": self.bound,
            "utilization": dict(self.utilization),
            "conditions": list(self.conditions),
        }


@dataclass
class KernelsMet:
    """The costs of kernels for one chip, and a note of those that were asked for.

    Attributes:
        chip: what they are compiled for.
        cache: where schedules are kept.
        reporter: told while a kernel is compiled.
        uses: by request, in the order in which they were met.
    """

    chip: Chip
    cache: Path
    reporter: Reporter | None = None
    uses: dict[str, KernelUse] = field(default_factory=dict)

    def __call__(
        self, instruction: Instruction, operands: Sequence[Instruction]
    ) -> KernelUse:
        """A custom call, and what one call of it takes.

        Raises:
            KernelError: it does not compile by itself, or its schedule is not read.
        """
        request = {
            "chip": self.chip.name,
            "config": instruction.config["custom_call_config"],
            # What it may take of each memory, wherever that lies in its program: by
            # itself it has the compiler's default, which is less.
            "scoped": [
                {**given, "offset": "0"}
                for given in instruction.config.get("scoped_memory_configs", ())
            ],
            "operands": [[a.dtype, list(a.shape)] for o in operands for a in o.arrays],
            "results": [[a.dtype, list(a.shape)] for a in instruction.arrays],
        }
        asked = json.dumps(request, sort_keys=True)
        if asked not in self.uses:
            name = instruction.name
            found, folder = kept_cost(
                request, self.cache, f"kernel {name}", self.reporter
            )
            cycles = float(found["cycles"])
            busy = found["utilization"].get(_MATRIX_UNIT, 0.0)
            self.uses[asked] = KernelUse(
                name=re.sub(r"[.\d]+$", "", name),
                cycles=cycles,
                bound=MXU if found["busiest"] == _MATRIX_UNIT else VECTOR,
                flops=busy * cycles * self.chip.flops_per_cycle,
                utilization=found["utilization"],
                folder=folder,
                conditions=tuple(found["conditions"]),
            )
        return self.uses[asked]


def keep_schedules(uses: Iterable[KernelUse], folder: Path) -> list[str]:
    """Copy the schedules of some kernels; returns the names of their folders."""
    names = []
    for use in uses:
        name = f"{use.name}-{use.key[:8]}"
        shutil.copytree(use.folder, folder / name, dirs_exist_ok=True)
        names.append(name)
    return names


def reader_hash() -> str:
    """Sha256 of the code that turns a dump into cycles; with new code it is read anew.

    Costs are kept on disk under this hash.
    """
    paths = (Path(__file__).with_name(f"{name}.py") for name in _READERS)
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def compiler_versions() -> dict[str, str]:
    """The versions of the installed packages that decide what is compiled."""
    packages = ("jax", "jaxlib", "libtpu")
    return {name: version(name) for name in packages if find_spec(name)}


def kept_cost(
    request: Mapping[str, Any],
    cache: Path,
    what: str,
    reporter: Reporter | None = None,
    *,
    keep_schedule: bool = True,
) -> tuple[dict[str, Any], Path]:
    """What the worker finds of a kernel, and the folder that keeps the finding.

    Args:
        request: what to compile, and for which chip: a custom call, or an attention
            ``case``; all that the schedule depends on, but for compiler and reader.
        cache: where folders are; named by the hash of the request.
        what: the kernel, in words.
        reporter: told while the kernel is compiled.
        keep_schedule: keep the compiler's schedule beside what is found.

    Raises:
        TopologyError: libtpu is not installed.
        KernelError: the kernel is refused, or something else went wrong.
    """
    versions, reader = compiler_versions(), reader_hash()
    whole = {**request, "format": _FORMAT, "versions": versions, "reader": reader}
    text = json.dumps(whole, sort_keys=True)
    folder = cache / hashlib.sha256(text.encode()).hexdigest()[:32]
    cost = folder / "cost.json"
    if not cost.is_file():
        check_libtpu(smallest_of(request["chip"]))
        cache.mkdir(parents=True, exist_ok=True)
        with (
            (reporter or Reporter()).timed(f"reading the schedule of {what}"),
            scratch_folder(place=cache) as temporary,
        ):
            work = temporary / "kernel"
            (work / "schedule").mkdir(parents=True)
            (work / "request.json").write_text(text)
            _run_worker(work, request["chip"], what)
            if not keep_schedule:
                shutil.rmtree(work / "schedule")
            try:
                os.replace(work, folder)
            except OSError:
                # Another process may have kept the same schedule meanwhile.
                if not cost.is_file():
                    raise
    return json.loads(cost.read_text()), folder


def _run_worker(work: Path, chip_name: str, what: str) -> None:
    """Have the request in a folder answered there, in a process of its own."""
    variables = {
        **compile_environment(smallest_of(chip_name)),
        "LIBTPU_INIT_ARGS": dump_flags(work / "schedule"),
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    # env(1) adds to what this process was started with.
    settings = (f"{name}={value}" for name, value in variables.items())
    worker = (sys.executable, "-m", "tpuport.core.cost.kernel_worker", str(work))
    try:
        done = subprocess.run(
            ["env", *settings, *worker],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise KernelError(
            f"{what} took more than {_TIMEOUT_SECONDS} s to compile", refused=True
        ) from error
    refused = work / "refused.txt"
    if refused.is_file():
        why = one_line(refused.read_text())[:400]
        raise KernelError(f"{what} cannot be compiled: {why}", refused=True)
    if done.returncode or not (work / "cost.json").is_file():
        last = one_line((done.stderr.strip().splitlines() or ["no message"])[-1])
        raise KernelError(f"compiling {what} ended with {done.returncode}: {last}")
