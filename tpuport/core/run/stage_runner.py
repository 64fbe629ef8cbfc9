"""The part of a session that runs stages, in memory and on a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tpuport.core.arrays import host_device
from tpuport.core.enums import Backend, Dtype, Place, Tiling
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_record import STAGE_FILES
from tpuport.core.files.sources import Source
from tpuport.core.mesh.device_mesh import PlacedMesh
from tpuport.core.programs.components import Components
from tpuport.core.programs.program_store import Programs
from tpuport.core.reports import Reporter, StageReport
from tpuport.core.run.executor import Executor
from tpuport.core.run.frame_delivery import Delivery, Sink
from tpuport.core.spec import rules
from tpuport.core.spec.choices import choices
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.request import Request
from tpuport.core.spec.requests import Requests
from tpuport.core.spec.rules import Known
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.stage import Stage
from tpuport.core.spec.variant import Variant
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import UsageError, WeightsError


class StageRunner:
    """One checkpoint on one mesh, and its stages one at a time.

    Args:
        port: the model, with its blocks and implementations in place.
        variant: the defaults and rules in force.
        checkpoint: the weights.
        mesh: the devices.
        settings: how to run; the dtype is known.
        reporter: told what happens.
    """

    def __init__(
        self,
        port: ModelPort,
        variant: Variant,
        checkpoint: Checkpoint,
        mesh: PlacedMesh,
        settings: RunSettings,
        reporter: Reporter | None = None,
    ) -> None:
        self.port = port
        self.variant = variant
        self.checkpoint = checkpoint
        self.mesh_spec, self.mesh = mesh.spec, mesh.mesh
        self.settings = settings
        self.reporter = reporter or Reporter()
        self._closed = False
        self.requests = Requests(port, variant, checkpoint, mesh, self.reporter)
        self.components = Components(
            port, checkpoint, self.mesh, settings, reporter=self.reporter
        )
        self.executor = Executor(
            self.components,
            settings,
            programs=Programs.of(
                self.components,
                settings.compiled_dir,
                settings.executables,
                self.reporter,
            ),
        )
        self._check_heads()
        self.executor.programs.check()

    @property
    def dtype(self) -> Dtype:
        """Of the weights."""
        return self.components.dtype

    @property
    def encode_on(self) -> Place:
        """Where the text encoder runs."""
        return self.settings.encode_on

    def request(self, **asked: Any) -> Request:
        """See :meth:`Requests.request`."""
        return self.requests.request(**asked)

    def check(self, request: Request, latents: torch.Tensor | None = None) -> None:
        """See :meth:`Requests.check`."""
        self.requests.check(request, latents)

    def _check_heads(self) -> None:
        """Refuse a mesh whose tp does not divide the heads of a component on it."""
        heads = {
            name: component.heads(self.checkpoint.config(name))
            for name, component in self.port.components.items()
            if component.heads is not None
            and (self.checkpoint.folder / name / "config.json").is_file()
            and not (name in self._encoders() and self.encode_on == Place.HOST)
        }
        self.mesh_spec.validate(heads=heads, batch=None)

    def _how(self, backend: str | None, vae_tiling: str | None) -> RunSettings:
        """Settings with what was asked for, in place of the session's."""
        given = {
            "backend": backend or self.settings.backend,
            "vae_tiling": vae_tiling or self.settings.vae_tiling,
        }
        return RunSettings.read(given, named=str)

    def _encoders(self) -> tuple[str, ...]:
        return self.port.stages[0].components

    # ---------------------------------------------------------------- weights

    def check_weights(
        self, stages: Sequence[str] | None = None, request: Request | None = None
    ) -> None:
        """Refuse files that do not fit before any work is done; reads headers only.

        Args:
            request: what will be run; without it, every component counts.
            stages: whose components; all of them when not given.

        Raises:
            WeightsError: a file, a tensor or a shape is off.
        """
        for stage in self.port.stages:
            if stages is not None and stage.name not in stages:
                continue
            if stage.require is not None:
                stage.require(self.checkpoint)
            for name in stage.components_for(request):
                if name not in self.components.loaded:
                    self.components.check_files(name)

    # ----------------------------------------------------------------- stages

    def run_stage(
        self,
        name: str,
        request: Request,
        inputs: Mapping[str, torch.Tensor],
        *,
        backend: str | None = None,
        delivery: Delivery | None = None,
        vae_tiling: str | None = None,
    ) -> tuple[dict[str, Any], StageReport]:
        """Run one stage on tensors in memory.

        Args:
            name: ``"encode"``, ``"denoise"`` or ``"decode"``.
            request: the whole run.
            inputs: the tensors of the stage before, videos in the leading dim; of
                encode, the pixels of ``request.sources`` as ``image`` or ``video``.
            backend: in place of the session's: ``"tpuport"``, or ``"diffusers"`` for
                plain upstream code on the host or its GPU.
            delivery: takes the frames of decode, as bytes or one by one, and can check
                them; without it they are float32 and returned.
            vae_tiling: of decode, in place of the session's: ``"auto"``, ``"on"`` or
                ``"off"``.

        Returns:
            The tensors the stage writes (decode: ``frames``, where no sink took them),
            and its report.
        """
        if name not in [stage.name for stage in self.port.stages]:
            raise UsageError(
                f"no stage is called {name!r}; there are "
                + ", ".join(stage.name for stage in self.port.stages)
            )
        if self._closed:
            raise UsageError("the session is closed; open another with tpuport.load")
        stage = self.port.stage(name)
        how = self._how(backend, vae_tiling)
        rules.check(Known(settings=how, port=self.port, request=request, stages=[name]))
        if how.backend == Backend.DIFFUSERS:
            self._refuse_chosen(stage, request)
            return self._run_upstream(
                stage, request, inputs, host_device(), delivery, how.vae_tiling
            )
        if stage is self.port.stages[0] and self.encode_on == Place.HOST:
            for name in self._chosen(stage, request):
                self.reporter.say(
                    f"{stage.name} runs on the host: its {name} is upstream's, not "
                    f"{self.port.chosen[name]}"
                )
            return self._run_upstream(stage, request, inputs, "cpu")
        with self.executor.programs.jax_cache():
            return self.executor.run(stage, request, inputs, delivery, how.vae_tiling)

    def _chosen(self, stage: Stage, request: Request) -> list[str]:
        """The components of a run of a stage that are not upstream's class."""
        used = stage.components_for(request)
        return [name for name in used if name in self.port.chosen]

    def _refuse_chosen(self, stage: Stage, request: Request) -> None:
        for name in self._chosen(stage, request):
            raise UsageError(
                f"{name} {self.port.chosen[name]!r} is not upstream's, which "
                f"{stage.name} runs with backend diffusers: leave it out, or use "
                "backend tpuport"
            )

    def _run_upstream(
        self,
        stage: Stage,
        request: Request,
        inputs: Mapping[str, torch.Tensor],
        device: str,
        delivery: Delivery | None = None,
        vae_tiling: Tiling | None = None,
    ) -> tuple[dict[str, Any], StageReport]:
        if self.mesh.size > 1:
            self.reporter.say(
                f"{stage.name} runs upstream's code on {device}, not on the mesh"
            )
        if stage.require is not None:
            stage.require(self.checkpoint)
        for name in stage.components_for(request):
            # The same refusals as on the mesh; upstream would fill a missing tensor
            # with random numbers and warn.
            self.components.check_files(name)
        return self.executor.run_upstream(
            stage, request, inputs, device, delivery, vae_tiling
        )

    # ---------------------------------------------------------- run directory

    def open_run(self, path: Path, request: Request) -> RunDirectory:
        """The run directory of a request: a new one, or one made for the same.

        Raises:
            ArtifactError: it is of another model, other settings or other weights.
        """
        names = [*self.port.components, *(f for s in self.port.stages for f in s.files)]
        weights = {name: self._fingerprint(name) for name in names}
        return RunDirectory.open_or_create(
            path,
            model=self.port.name,
            variant=self.variant.name,
            settings=request.as_dict(),
            weights=weights,
        )

    def _fingerprint(self, name: str) -> str | None:
        """Of a folder as it is recorded; ``None`` where it is absent or damaged."""
        if not self.checkpoint.has(name):
            return None
        if name in self.port.components:
            try:
                self.components.check_files(name)
            except WeightsError:
                # A stage that needs it will refuse it; once mended, it is recorded.
                return None
        return self.checkpoint.fingerprint(name)

    def run_stage_in(
        self,
        run: RunDirectory,
        name: str,
        *,
        backend: str | None = None,
        source: Source | None = None,
        extra: Mapping[str, torch.Tensor] | None = None,
        note: Mapping[str, Any] | None = None,
        pixels: str = "float32",
        on_frames: Sink | None = None,
    ) -> tuple[dict[str, Any], StageReport]:
        """Run one stage on a run directory: its inputs are read, its tensors written.

        Args:
            run: opened by :meth:`open_run` or :meth:`RunDirectory.open`.
            name: of the stage.
            backend: see :meth:`run_stage`.
            source: what encode starts from, where the run has one.
            extra: tensors written beside the stage's own, such as initial latents.
            note: JSON kept with the stage's report in run.json, as ``"note"``.
            pixels, on_frames: of decode; see :meth:`Session.generate`.

        Returns:
            As :meth:`run_stage`. The frames of decode are checked, not written; with
            ``on_frames`` they are not returned.

        Raises:
            ArtifactError: an input is missing, altered or of other weights.
            VideoError: latents or frames are not finite, constant or black.
        """
        stage = self.port.stage(name)
        request = Request.from_dict(run.settings)
        self.check(request)
        run.check_request(model=self.port.name, variant=self.variant.name)
        for folder in (*stage.components_for(request), *stage.files):
            if self.checkpoint.has(folder):
                run.check_weights(folder, self.checkpoint.fingerprint(folder))
        order = [s.name for s in self.port.stages]
        inputs: dict[str, torch.Tensor] = {}
        if stage is self.port.stages[0] and request.sources:
            inputs = self._source_pixels(request, source)
        if order.index(name):
            before = self.port.stages[order.index(name) - 1]
            inputs = run.read_stage(before.name, before.writes)
        delivery = Delivery(pixels, on_frames)
        tensors, report = self.run_stage(
            name, request, inputs, backend=backend, delivery=delivery
        )
        if stage.writes:
            dropped = run.invalidate_after(name, order)
            if dropped:
                self.reporter.say(
                    f"{name} was run again: what {' and '.join(dropped)} made of its "
                    "last result is dropped"
                )
            run.write_stage(
                name,
                STAGE_FILES[name],
                {**tensors, **(extra or {})},
                stage.writes,
                {**self.stage_record(report), "note": dict(note or {})},
            )
        else:
            delivery.check()
        return tensors, report

    def _source_pixels(
        self, request: Request, source: Source | None
    ) -> dict[str, torch.Tensor]:
        """The pixels that encode reads, found to be those of the request."""
        count = len(request.prompts)
        if source is None:
            raise UsageError(
                f"this run starts from {count} source(s) ({request.task}); give them"
            )
        if source.digests_for(count) != request.sources:
            raise UsageError(f"the {source.kind} is another than the run was made for")
        return {source.kind: source.for_videos(count)}

    def stage_record(self, report: StageReport) -> dict[str, Any]:
        """What run.json keeps of a stage: its report and where it ran."""

        return {
            **report.as_dict(),
            "weights": self.checkpoint.reference,
            "dtype": self.dtype,
            "mesh": str(self.mesh_spec),
            "sharding": self.components.layout,
            "blocks": self.port.blocks,
            # Upstream's own code has its own.
            "implementations": {}
            if report.backend == Backend.DIFFUSERS
            else choices(self.port, self.port.stage(report.stage).components),
            "platform": self.components.platform,
        }
