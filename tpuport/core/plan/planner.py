"""Plans a run: every program compiled for a topology, its memory and its time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tpuport.core.cost.kernel_cycles import KernelsMet, keep_schedules
from tpuport.core.mesh.chips import chip as chip_named
from tpuport.core.mesh.compiler_flags import flags_for
from tpuport.core.mesh.device_mesh import build_mesh, place_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec, divisors
from tpuport.core.mesh.slices import Topology, topology_devices
from tpuport.core.plan.abstract_programs import AbstractProgram, abstract_programs
from tpuport.core.plan.default_mesh import default_mesh, heads_of
from tpuport.core.plan.dump_folder import keep_program
from tpuport.core.plan.measure import Measured, measure
from tpuport.core.plan.plan import Plan, StagePlan
from tpuport.core.programs.components import Components
from tpuport.core.reports import Reporter
from tpuport.core.spec.choices import choices, with_chosen
from tpuport.core.spec.model_port import ModelPort, with_blocks
from tpuport.core.spec.request import Request
from tpuport.core.spec.requests import Requests
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.tiling import TilingDecision
from tpuport.core.spec.variant import Variant
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.gathering import WEIGHT_SHARE, undivided
from tpuport.errors import MeshError, ShardingError


@dataclass(kw_only=True)
class _Form:
    """What was compiled of a stage, in tiles or not."""

    tiled: bool
    kernels: KernelsMet
    programs: list[Measured] = field(default_factory=list)


@dataclass(kw_only=True)
class Planner:
    """Plans runs of one model on one topology.

    Attributes:
        port: the form of the model that the checkpoint is of.
        variant: whose defaults and rules hold.
        checkpoint: configs and tokenizers.
        topology: the slice.
        cache: a folder for the schedules of kernels.
        ask: makes the request for a mesh, which may refuse one.
        settings: how to run; the dtype is known.
        stages: names of those to plan; all of them when not given.
        inputs: what the first stage reads: the pixels of an image or a video.
        reporter: told what happens.
        dump: a folder for compiled programs, accounts and schedules; ``written`` are
            the names of what all plans put there.
        skeletons: modules without weights, the same on every mesh and slice.
    """

    port: ModelPort
    variant: Variant
    checkpoint: Checkpoint
    topology: Topology
    cache: Path
    ask: Callable[[Requests], Request]
    settings: RunSettings
    stages: Sequence[str] | None = None
    inputs: Mapping[str, Any] | None = None
    reporter: Reporter = field(default_factory=Reporter)
    dump: Path | None = None
    skeletons: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.port = with_blocks(self.port, self.settings.blocks)
        self.port = with_chosen(self.port, self.settings.implementations)
        self.say = self.reporter.say
        self.chip = chip_named(self.topology.chip)
        self.devices = topology_devices(self.topology)
        for remark in flags_for(self.devices[0]).remarks():
            self.say(remark)
        self._sharding_plans: dict[MeshSpec, tuple[Any, ...]] = {}
        self._tiling: dict[str, TilingDecision] = {}
        self.written: list[str] = []

    def elsewhere(self, topology: Topology) -> Planner:
        """The planner of the same run on another slice."""
        return replace(self, topology=topology, reporter=Reporter())

    # ------------------------------------------------------------------ meshes

    def default_mesh(self) -> MeshSpec:
        """What ``generate`` takes on this slice when no mesh is named."""
        request = self.request(MeshSpec())
        rows = [s.batch_rows(request) for s in self.port.stages if s.batch_rows]
        most = max(rows, default=1)
        return default_mesh(self.port, self.checkpoint, self.devices, rows=most)

    def check_mesh(self, spec: MeshSpec) -> None:
        """Refuse a mesh that a session would refuse.

        Raises:
            MeshError: it does not fit the devices, the heads or the batch.
            ShardingError: a weight cannot be split that way.
        """
        count = len(self.devices)
        heads = heads_of(self.port, self.checkpoint)
        spec.resolve(count).validate(heads=heads, devices=count)
        self.request(spec)
        self.sharding_plans(spec)

    def legal_meshes(self) -> list[MeshSpec]:
        """All meshes of all devices that this run may have."""
        count = len(self.devices)
        found = []
        for dp in divisors(count):
            for tp in divisors(count // dp):
                spec = MeshSpec(dp=dp, sp=count // dp // tp, tp=tp)
                try:
                    self.check_mesh(spec)
                except (MeshError, ShardingError):
                    continue
                found.append(spec)
        return found

    def unused(self, spec: MeshSpec) -> str | None:
        """The remark on devices of the slice that a mesh leaves unused, if any."""
        kind = "chip" if self.chip.devices_per_chip == 1 else "device"
        return spec.unused(len(self.devices), kind)

    # ------------------------------------------------------------------- plans

    def request(self, spec: MeshSpec) -> Request:
        """The run on a mesh.

        Raises:
            UsageError, MeshError: it is off a rule.
        """
        return self.ask(self.requests(spec))

    def requests(self, spec: MeshSpec) -> Requests:
        """What makes and checks requests for a mesh."""
        mesh = place_mesh(spec, self.devices)
        return Requests(self.port, self.variant, self.checkpoint, mesh)

    def components(self, spec: MeshSpec) -> Components:
        """The components on a mesh; nothing is read but configs."""
        return Components(
            self.port,
            self.checkpoint,
            build_mesh(spec, self.devices),
            self.settings,
            skeletons=self.skeletons,
        )

    def sharding_plans(self, spec: MeshSpec) -> tuple[Any, ...]:
        """Where the weights of the components go that the planned stages need."""
        if spec not in self._sharding_plans:
            components = self.components(spec)
            request = self.request(spec)
            names = [n for s in self._stages() for n in s.components_for(request)]
            self._sharding_plans[spec] = tuple(
                components.plan(name) for name in dict.fromkeys(names)
            )
        return self._sharding_plans[spec]

    def weight_bytes(self, spec: MeshSpec) -> int:
        """Bytes of weights on one device, in the stage with most weights."""
        plans = {p.component: p for p in self.sharding_plans(spec)}
        request = self.request(spec)
        return max(
            sum(plans[n].bytes_per_device for n in s.components_for(request))
            for s in self._stages()
        )

    def _stages(self) -> list[Any]:
        wanted = self.stages
        return [s for s in self.port.stages if wanted is None or s.name in wanted]

    def programs(
        self, spec: MeshSpec, request: Request, stages: Sequence[str]
    ) -> Iterator[AbstractProgram]:
        """The distinct programs of a run on a mesh."""
        return abstract_programs(
            self.components(spec),
            request,
            self.settings,
            stages=stages,
            inputs=self.inputs,
            decided=lambda tiling: self._tiling.update({tiling.stage: tiling}),
            reporter=self.reporter,
        )

    def plan(
        self,
        spec: MeshSpec,
        *,
        request: Request | None = None,
        stages: Sequence[str] | None = None,
        keep: bool = True,
    ) -> Plan:
        """Compile every program of the run on a mesh and add it up.

        Args:
            spec: the mesh.
            request: in place of the planner's own.
            stages: in place of the planner's own.
            keep: whether it goes to the dump, if there is one.

        Raises:
            MeshError, ShardingError, UsageError: the run is not legal on the mesh.
            KernelError, HloError: what was compiled could not be read.
        """
        spec = spec.resolve(len(self.devices))
        self.check_mesh(spec)
        asked = self.request(spec) if request is None else request
        names = list(stages) if stages is not None else [s.name for s in self._stages()]
        found, files = self._compiled(spec, asked, names, self.dump if keep else None)
        return Plan(
            model=self.port.name,
            variant=self.variant.name,
            weights=self.checkpoint.source,
            topology=self.topology.name,
            chip=self.chip,
            mesh=spec,
            settings=asked.as_dict(),
            dtype=str(self.settings.dtype),
            attention=str(self.settings.attention),
            sharding=self.settings.sharding,
            blocks=self.port.blocks,
            implementations=choices(self.port),
            compiler_flags=self._flags(found),
            stages=tuple(
                StagePlan(
                    name=name,
                    programs=tuple(form.programs),
                    chip=self.chip,
                    kernels=tuple(use.as_dict() for use in form.kernels.uses.values()),
                )
                for name, form in found.items()
            ),
            sharding_plans=self.sharding_plans(spec),
            files=files,
            notes=self._notes(spec, found),
            tiling={n: t.as_dict() for n, t in self._tiling.items() if n in found},
        )

    def _compiled(
        self, spec: MeshSpec, asked: Request, names: Sequence[str], dump: Path | None
    ) -> tuple[dict[str, _Form], list[str]]:
        """The programs of each stage in the form that it runs in, and files.

        In the dump there is a form too that was compiled and found to be too large.
        """
        found: dict[str, _Form] = {}
        forms: list[_Form] = []
        files: list[str] = []
        for program in self.programs(spec, asked, names):
            tiled = program.tiling is not None and program.tiling.tiled
            stage = program.asked.stage
            form = found.get(stage)
            if form is None or form.tiled != tiled:
                kernels = KernelsMet(self.chip, self.cache, self.reporter)
                form = _Form(tiled=tiled, kernels=kernels)
                found[stage] = form
                forms.append(form)
            what = f"compiling {program.asked.label} for {spec} of {self.topology.name}"
            with self.reporter.timed(what):
                measured = measure(
                    program,
                    self.topology,
                    self.chip,
                    form.kernels,
                    keep_text=dump is not None,
                )
            program.needed = measured.memory.total
            program.forget()
            if dump is not None:
                number = len(form.programs)
                files += self._noted(
                    keep_program(dump, measured, number, spec, self.chip)
                )
                measured = replace(measured, hlo="")
            form.programs.append(measured)
        if dump is not None:
            uses = {k: use for form in forms for k, use in form.kernels.uses.items()}
            files += self._noted(keep_schedules(uses.values(), dump))
        return found, files

    def _notes(self, spec: MeshSpec, found: Mapping[str, _Form]) -> list[str]:
        """What the accounts say, and which weights are whole on every device."""
        accounts = [p.account for form in found.values() for p in form.programs]
        notes = [note for account in accounts if account for note in account.notes]
        room = WEIGHT_SHARE * self.chip.hbm_usable_bytes
        for weights in self.sharding_plans(spec):
            if self.port.components[weights.component].stacked:
                notes += filter(None, [undivided(weights, room=room)])
        return notes

    def _noted(self, names: list[str]) -> list[str]:
        self.written += [name for name in names if name not in self.written]
        return names

    def _flags(self, stages: Iterable[str]) -> tuple[str, ...]:
        """What tpuport sets for the programs of some stages, each once."""
        chosen = [flags_for(self.devices[0], stage) for stage in stages]
        return tuple(dict.fromkeys(text for one in chosen for text in one.texts))
