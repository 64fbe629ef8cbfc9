"""What a plan found, as a value: for people, for JSON, for a choice between plans."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from tpuport.core.cost.program_time import Account
from tpuport.core.files.run_record import STAGES
from tpuport.core.mesh.chips import Chip
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.plan.measure import Measured

DENOISE = STAGES[1]
"""The stage whose calls are steps."""


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """One stage of the run.

    Attributes:
        name: of the stage.
        programs: that it compiles.
        chip: for utilisation.
        kernels: the Pallas kernels that they call, JSON-ready.
        steps: how often ``scheduler.step`` is called, where a step may be several
            calls; ``None`` where each call is one.
    """

    name: str
    programs: tuple[Measured, ...]
    chip: Chip
    kernels: tuple[dict[str, Any], ...] = ()
    steps: int | None = None

    @property
    def calls(self) -> int:
        """Steps, or calls of all its programs over the run."""
        return self.steps or sum(p.calls for p in self.programs)

    def _sum(self, what: Callable[[Account], float]) -> float | None:
        """Over all calls; ``None`` where a program does not fit."""
        return _total(
            None if p.account is None else p.calls * what(p.account)
            for p in self.programs
        )

    @property
    def seconds(self) -> float | None:
        """Seconds of all calls; ``None`` if a program does not fit."""
        return self._sum(lambda account: account.seconds)

    @property
    def floor_per_call(self) -> float | None:
        """The mean over its calls of :attr:`Account.floor`."""
        total = self._sum(lambda account: account.floor)
        return None if total is None else total / self.calls

    @property
    def seconds_per_call(self) -> float | None:
        """The mean over its calls."""
        return None if self.seconds is None else self.seconds / self.calls

    @property
    def flops(self) -> float:
        """Model FLOPs of all calls, on all devices together."""
        return math.fsum(p.calls * p.flops for p in self.programs)

    @property
    def utilization(self) -> float | None:
        """Model FLOPs over what its devices could do in the time."""
        if not self.seconds:
            return None
        devices = max(p.devices for p in self.programs)
        return self.flops / (self.seconds * devices * self.chip.peak_flops)

    def split(self) -> dict[str, float]:
        """Seconds of a call by category, the mean over the calls."""
        return self._mean(Account.split)

    def bounds(self) -> dict[str, float]:
        """Seconds of a call by the unit that limits them, the mean over the calls."""
        return self._mean(Account.bounds)

    @property
    def link_seconds(self) -> float | None:
        """Seconds that weights take from the host, the mean over the calls."""
        total = self._sum(lambda account: account.link_seconds)
        return None if total is None else total / self.calls

    @property
    def bound(self) -> str | None:
        """The unit that limits most of the time."""
        bounds = self.bounds()
        return max(bounds, key=lambda n: bounds[n]) if bounds else None

    def _mean(self, what: Callable[[Account], dict[str, float]]) -> dict[str, float]:
        found: dict[str, float] = defaultdict(float)
        for program in self.programs:
            if program.account is None:
                return {}
            for name, seconds in what(program.account).items():
                found[name] += seconds * program.calls / self.calls
        return dict(found)

    def as_dict(self) -> dict[str, Any]:
        return {
            **_told(self, "calls seconds seconds_per_call floor_per_call"),
            "split": self.split(),
            "bounds": self.bounds(),
            "bound": self.bound,
            "link_seconds": self.link_seconds,
            "model_flops": self.flops,
            "utilization": self.utilization,
            "programs": [_program(p, self.chip) for p in self.programs],
        }


@dataclass(kw_only=True)
class Plan:
    """A run on a topology.

    Attributes:
        model, weights: what runs.
        topology: the name of the slice.
        slices: how many of it.
        chip: its constants.
        mesh: the devices.
        settings: the request, JSON-ready, with upstream's default size.
        dtype, attention, sharding: as ``generate`` takes them.
        blocks: those in place; ``"upstream"`` without a plugin that has others.
        stages: those planned, in order.
        compiler_flags: those that tpuport sets for these stages on the chip.
        sharding_plans: of the components on the mesh.
        meshes: with a search, what was found for each.
        files: what it wrote to the dump; of a search, all that was written.
        notes: what could not be known.
        calls: every module that upstream calls: its name, its
            stage, how often, and the dtypes and shapes of the inputs.
        host_seconds: of a step, outside of programs, on this machine.
    """

    model: str
    weights: str
    topology: str
    slices: int = 1
    chip: Chip
    mesh: MeshSpec
    settings: Mapping[str, Any]
    dtype: str
    attention: str
    sharding: str
    blocks: str
    stages: tuple[StagePlan, ...]
    compiler_flags: tuple[str, ...] = ()
    sharding_plans: tuple[Any, ...] = ()
    meshes: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    host_seconds: float | None = None

    @property
    def programs(self) -> tuple[Measured, ...]:
        return tuple(p for stage in self.stages for p in stage.programs)

    @property
    def kernels(self) -> tuple[dict[str, Any], ...]:
        """The Pallas kernels that the stages call, each once."""
        found = {use["key"]: use for stage in self.stages for use in stage.kernels}
        return tuple(found.values())

    @property
    def fits(self) -> bool:
        """Whether every program lies in a device's memory."""
        return all(p.fits for p in self.programs)

    @property
    def hbm_bytes(self) -> int:
        """The most that a device needs at any time."""
        return max((p.memory.total for p in self.programs), default=0)

    @property
    def host_bytes(self) -> int:
        """The most weights that wait in the host's memory for one device."""
        return max((p.memory.host for p in self.programs), default=0)

    @property
    def compile_seconds(self) -> float:
        """Seconds of compiling all programs, without tracing."""
        return math.fsum(p.compile_seconds for p in self.programs)

    @property
    def program_bytes(self) -> int:
        """Code of all programs."""
        return sum(p.memory.code for p in self.programs)

    @property
    def seconds(self) -> float | None:
        """Seconds of the planned stages, over the whole run."""
        return _total(stage.seconds for stage in self.stages)

    def stage(self, name: str) -> StagePlan | None:
        return next((s for s in self.stages if s.name == name), None)

    @property
    def seconds_per_step(self) -> float | None:
        """Seconds of a denoising step; the mean if steps differ."""
        stage = self.stage(DENOISE)
        return None if stage is None else stage.seconds_per_call

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready. Keys that scripts rely on are documented with the command."""
        denoise = self.stage(DENOISE)
        return {
            **_told(self, "model weights topology"),
            "slice_count": self.slices,
            "chip": self.chip.as_dict(),
            "mesh": self.mesh.shape,
            "devices": self.mesh.size,
            **_told(self, "settings dtype attention sharding blocks"),
            "compiler_flags": list(self.compiler_flags),
            "fits": self.fits,
            "hbm_bytes_per_chip": self.hbm_bytes,
            "hbm_limit_bytes": self.chip.hbm_usable_bytes,
            "host_bytes_per_chip": self.host_bytes,
            "seconds_per_step": self.seconds_per_step,
            "floor_per_step": denoise.floor_per_call if denoise else None,
            "stage_seconds": {
                name: None if (found := self.stage(name)) is None else found.seconds
                for name in STAGES
            },
            "run_seconds": self.seconds,
            "compile_seconds": self.compile_seconds,
            "lower_seconds": math.fsum(p.lower_seconds for p in self.programs),
            "program_bytes": self.program_bytes,
            "collectives": [
                {"stage": p.stage, "program": p.program, **asdict(use)}
                for p in self.programs
                if p.account is not None
                for use in p.account.collectives()
            ],
            "split": denoise.split() if denoise else {},
            "bound": denoise.bound if denoise else None,
            "bounds": denoise.bounds() if denoise else {},
            "model_flops_per_step": denoise.flops / denoise.calls if denoise else None,
            "utilization": denoise.utilization if denoise else None,
            "stages": {stage.name: stage.as_dict() for stage in self.stages},
            "sharding_plans": [p.as_dict() for p in self.sharding_plans],
            "kernels": list(self.kernels),
            **_told(self, "meshes files notes calls"),
        }


def _program(program: Measured, chip: Chip) -> dict[str, Any]:
    account = program.account
    return {
        **_told(program, "program component calls devices fits"),
        "memory": asdict(program.memory),
        **_told(program, "lower_seconds compile_seconds"),
        "program_bytes": program.memory.code,
        "seconds": program.seconds,
        "split": account.split() if account else {},
        "bounds": account.bounds() if account else {},
        "bound": account.bound if account else None,
        "model_flops": program.flops,
        "utilization": program.utilization(chip),
        **_told(program, "attention convolutions"),
        "error": program.error or None,
    }


def _told(what: Any, names: str) -> dict[str, Any]:
    """Attributes that are JSON-ready, by name."""
    return {name: getattr(what, name) for name in names.split()}


def _total(seconds: Any) -> float | None:
    found = list(seconds)
    if not found or any(s is None for s in found):
        return None
    return math.fsum(found)
