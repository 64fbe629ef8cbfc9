"""One program compiled for a topology, and what the compiler says of it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tpuport.core.cost.flops import model_flops
from tpuport.core.cost.hlo import parse
from tpuport.core.cost.network import Network
from tpuport.core.cost.program_time import Account, Kernels, account
from tpuport.core.drive.rehearsal import Rehearsed
from tpuport.core.files.atomic import atomic_write_bytes, one_line
from tpuport.core.mesh.chips import Chip
from tpuport.core.mesh.device_memory import array_bytes, plan_of, refused_bytes
from tpuport.core.mesh.device_mesh import on_one_slice
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import Topology
from tpuport.core.plan.building import CompileError
from tpuport.core.plan.dump_folder import ACCOUNT, HLO

#: Characters that are kept of a compiler's message.
_WORDS = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """HBM of one device while a program runs, in bytes.

    Attributes:
        weights: of the program's component.
        inputs: other arguments, and outputs that do not take their place.
        temporaries: activations at their peak.
        code: the program itself.
        resident: what else the stage holds: weights of other components, outputs of
            other calls.
        total: the sum; for a program that does not fit, what the compiler says it would
            use.
        host: bytes of weights that wait in the host's memory for the device; no HBM.
    """

    weights: int
    inputs: int
    temporaries: int
    code: int
    resident: int
    total: int
    host: int = 0


@dataclass(kw_only=True)
class Measured:
    """What is known of one compiled program.

    Attributes:
        stage, program, component, calls: which, and how often the run calls it.
        memory: of one device.
        fits: whether that is within ``limit``.
        limit: bytes of HBM that a program may use.
        lower_seconds, compile_seconds: what it took to get here.
        account: the time of one call; ``None`` where it did not compile.
        flops: model FLOPs of one call, on all devices together.
        devices: how many it runs on.
        attention: what its attention calls run as.
        convolutions: what its convolutions run as.
        error: the compiler's words, where it did not compile for lack of memory.
        hlo: the text of the compiled program.
    """

    stage: str
    program: str
    component: str
    calls: int
    memory: Memory
    limit: int
    lower_seconds: float
    compile_seconds: float
    account: Account | None
    flops: float
    devices: int
    attention: list[dict[str, Any]] = field(default_factory=list)
    convolutions: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    hlo: str = field(default="", repr=False)

    @property
    def fits(self) -> bool:
        """Whether the program and all it needs lie in a device's memory."""
        return not self.error and self.memory.total <= self.limit

    @property
    def seconds(self) -> float | None:
        """Seconds of one call."""
        return None if self.account is None else self.account.seconds

    def utilization(self, chip: Chip) -> float | None:
        """Model FLOPs over what the devices could do in the time."""
        if not self.seconds:
            return None
        return self.flops / (self.seconds * self.devices * chip.peak_flops)


def measure(
    program: Rehearsed,
    topology: Topology,
    chip: Chip,
    kernels: Kernels,
    *,
    keep_text: bool = False,
) -> Measured:
    """Compile one program and add up its memory and its time.

    A program that is too large for the memory is a result, not an error.

    Raises:
        KernelError: the schedule of a kernel could not be had.
        HloError: the compiled program could not be read.
        CompileError: it does not compile, for another reason than its size.
    """
    started = time.perf_counter()
    lowered = program.lowered()
    lowered_at = time.perf_counter()
    weights, resident = array_bytes(program.weights.values()), program.resident
    waiting = array_bytes(program.weights.values(), host=True)
    flops = model_flops(program.traced.jaxpr, program.attention)
    text = refused = ""
    before = time.perf_counter()
    try:
        compiled = lowered.compile()
    except Exception as error:  # jaxlib raises one class for everything
        used = refused_bytes(str(error))
        refused = one_line(error)
        if used is None:
            # The rest of such a message is the program's text.
            label = f"{program.stage}/{program.name}"
            words = f"{label} does not compile: {refused[:_WORDS]}"
            raise CompileError(words) from error
        parts = {"temporaries": max(used - weights, 0)}
        memory = _memory(parts, weights, resident, used + resident)
        took = time.perf_counter() - before
        found = None
    else:
        took = time.perf_counter() - before
        text = compiled.as_text()
        memory = _memory(plan_of(compiled), weights, resident)
        devices, mesh = on_one_slice(program.mesh)
        network = Network(topology, chip, devices)
        found = account(parse(text), chip, network, mesh, kernels)
    return Measured(
        stage=program.stage,
        program=program.name,
        component=program.component,
        calls=program.calls,
        memory=replace(memory, host=waiting),
        limit=chip.hbm_usable_bytes,
        lower_seconds=lowered_at - started,
        compile_seconds=took,
        account=found,
        flops=flops,
        devices=program.mesh.size,
        attention=[asdict(record) for record in program.attention],
        convolutions=[asdict(record) for record in program.convolutions],
        error=refused[:500],
        hlo=text if keep_text else "",
    )


def _memory(
    parts: Mapping[str, int], weights: int, resident: int, total: int | None = None
) -> Memory:
    """From :func:`plan_of`; the total is the compiler's where it refuses a program."""
    inputs = max(parts.get("arguments", 0) - weights, 0)
    inputs += parts.get("outputs", 0) - parts.get("shared", 0)
    temporaries, code = parts.get("temporaries", 0), parts.get("code", 0)
    every = weights + inputs + temporaries + code + resident
    return Memory(
        weights=weights,
        inputs=inputs,
        temporaries=temporaries,
        code=code,
        resident=resident,
        total=every if total is None else total,
    )


def keep_program(
    dump: Path, measured: Measured, number: int, spec: MeshSpec, chip: Chip
) -> list[str]:
    """Write a compiled program and its account; the names of the files."""
    dump.mkdir(parents=True, exist_ok=True)
    mesh = "-".join(f"{axis}{size}" for axis, size in spec.shape.items())
    name = f"{measured.stage}-{measured.program}-{number}-{mesh}"
    written = []
    if measured.hlo:
        atomic_write_bytes(dump / f"{name}{HLO}", measured.hlo.encode())
        written.append(f"{name}{HLO}")
    if measured.account is not None:
        document = {
            "stage": measured.stage,
            "program": measured.program,
            "calls": measured.calls,
            "clock_hz": chip.clock_hz,
            "seconds": measured.account.seconds,
            "rows": [row.as_dict() for row in measured.account.rows],
        }
        path = dump / f"{name}{ACCOUNT}"
        atomic_write_bytes(path, json.dumps(document, indent=1).encode() + b"\n")
        written.append(path.name)
    return written
