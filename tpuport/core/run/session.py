"""The only orchestrator: a checkpoint, a mesh, and the stages run on them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tpuport.core import reports
from tpuport.core.arrays import host_device, to_torch
from tpuport.core.enums import Backend, Dtype, Pixels, Place, StageName
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.sources import Source
from tpuport.core.mesh.compiler_flags import flags_for
from tpuport.core.mesh.device_mesh import PlacedMesh
from tpuport.core.programs.built_folder import BuiltFolder
from tpuport.core.programs.components import Components
from tpuport.core.programs.program_store import Programs
from tpuport.core.reports import Reporter, RunReport, StageReport
from tpuport.core.run.executor import Executor
from tpuport.core.run.frame_delivery import Delivery, Sink
from tpuport.core.run.result import Result, no_frames
from tpuport.core.run.sidecar import Origin, stage_note
from tpuport.core.spec import rules
from tpuport.core.spec.choices import choices
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.request import Request, check_given
from tpuport.core.spec.requests import Requests, read_source, recorded_request
from tpuport.core.spec.rules import Known
from tpuport.core.spec.run_settings import (
    Asked,
    RunSettings,
    defaults_of,
    python_words,
)
from tpuport.core.spec.stage import Stage
from tpuport.core.spec.stage_work import not_finite
from tpuport.core.spec.tiling import DoesNotFitError
from tpuport.core.spec.variant import Variant
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import UsageError, WeightsError


class Session:
    """One checkpoint on one mesh. Made by :func:`tpuport.load`.

    Used in a ``with`` block it frees its weights and compiled programs at the end, also
    after an error. Patches and op overrides are active only while a program is traced,
    so upstream code behaves as always beside an open session.

    Args:
        port: the model, with its blocks and implementations in place.
        variant: the defaults and rules in force.
        checkpoint: the weights.
        mesh: the devices.
        settings: how to run; the dtype is known.
        reporter: told what happens.

    Attributes:
        request: makes a checked request; see :meth:`Requests.request`.
        check: refuses what cannot be done here; see :meth:`Requests.check`.
    """

    def __init__(
        self,
        port: ModelPort,
        variant: Variant,
        checkpoint: Checkpoint,
        mesh: PlacedMesh,
        settings: RunSettings,
        reporter: Reporter,
    ) -> None:
        self.port = port
        self.variant = variant
        self.checkpoint = checkpoint
        self.mesh_spec, self.mesh = mesh.spec, mesh.mesh
        self.settings = settings
        self.reporter = reporter
        self._closed = False
        self.requests = Requests(port, variant, checkpoint, mesh, reporter, here=True)
        self.request = self.requests.request
        self.check = self.requests.check
        self.components = Components(
            port, checkpoint, self.mesh, settings, reporter=reporter
        )
        for remark in flags_for(self.mesh.devices.flat[0]).remarks():
            reporter.say(remark)
        built = BuiltFolder.open(settings.executables) if settings.executables else None
        self._check_heads()
        if built is not None:
            built.check(self.components)
        self.executor = Executor(
            self.components,
            settings,
            programs=Programs(
                self.components,
                cache=settings.compiled_dir,
                built=built,
                reporter=reporter,
            ),
        )

    @property
    def dtype(self) -> Dtype:
        """Of the weights."""
        return self.components.dtype

    @property
    def encode_on(self) -> Place:
        """Where the text encoder runs."""
        return self.settings.encode_on

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and compiled programs; the session cannot be used after it."""
        self._closed = True
        self.executor.close()

    # ----------------------------------------------------------------- checks

    def _check_heads(self) -> None:
        """Refuse a mesh whose tp does not divide the heads of a component on it."""
        on_host = self.port.stages[0].components if self.encode_on == Place.HOST else ()
        heads = {
            name: component.heads(self.checkpoint.config(name))
            for name, component in self.port.components.items()
            if component.heads is not None
            and (self.checkpoint.folder / name / "config.json").is_file()
            and name not in on_host
        }
        self.mesh_spec.validate(heads=heads)

    def _how(self, backend: str | None, vae_tiling: str | None) -> RunSettings:
        """Settings with what was asked for, in place of the session's."""
        given = {
            "backend": backend or self.settings.backend,
            "vae_tiling": vae_tiling or self.settings.vae_tiling,
        }
        return RunSettings.read(given, named=str)

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
            if stages is None or stage.name in stages:
                self._check_files(stage, request, self.components.loaded)

    def _check_files(
        self, stage: Stage, request: Request | None, loaded: Sequence[str] = ()
    ) -> None:
        """Refuse the files of a stage, but of components that are ``loaded``."""
        if stage.require is not None:
            stage.require(self.checkpoint)
        for name in stage.components_for(request):
            if name not in loaded:
                self.components.check_files(name)

    # ---------------------------------------------------------------- generate

    @python_words()
    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        latents: torch.Tensor | None = None,
        backend: str | None = None,
        pixels: str = Pixels.FLOAT32,
        on_frames: Sink | None = None,
        vae_tiling: str | None = None,
        **asked: Any,
    ) -> Result:
        """Make videos, as one call of the upstream pipeline would.

        Args:
            prompt: one, or several for one batch.
            latents: initial noise in place of a seed's, in the pipeline's layout.
            backend: ``"diffusers"`` runs plain upstream code; without it the session's.
            pixels: of the frames: ``"float32"`` in [0, 1], or ``"uint8"``, which are
                made on the device.
            on_frames: ``on_frames(first, frames)`` gets frames [B, F, Y, X, 3] of
                videos ``first`` on as they are made, in their order; :class:`Result`
                then has none. They are checked when all are made: what was done with
                them before a VideoError is to be thrown away.
            vae_tiling: ``"auto"``, ``"on"`` or ``"off"`` in place of the session's.
            asked: the fields of :class:`~tpuport.core.spec.run_settings.Asked`, such as
                ``height`` or ``seed``; options of this model, such as
                ``scheduler="ddim"``; tensors in place of prompts, by the names that the
                encode stage writes: ``prompt_embeds``, ``negative_prompt_embeds`` and
                what belongs to them.

        Returns:
            :class:`Result`.

        Raises:
            UsageError: a value is off its rule, or two exclude each other.
            VideoError: latents or frames are not finite, constant or black.
        """
        started = time.perf_counter()
        how = self._how(backend, vae_tiling)
        delivery = Delivery(pixels, on_frames)
        request, source, given = self._asked(prompt, asked)
        tensors: dict[str, Any] = self._source_pixels(request, source)
        if latents is not None:
            latents = to_torch(latents)
            self.check(request, latents)
            given = {**given, "initial_latents": latents}
        names = self._needed(request, tensors, given)
        rules.check(
            Known(settings=how, port=self.port, request=request, stages=list(StageName))
        )
        self.check_weights(names, request)
        if how.backend != Backend.DIFFUSERS:
            needed = [self.port.stage(name) for name in names]
            self.executor.check_built(request, needed, how.vae_tiling)
        stages: list[StageReport] = []
        for name in names:
            # As upstream: what was given stands, the rest is encoded.
            inputs = {**tensors, **given} if name == StageName.DENOISE else tensors
            tensors, report = self.run_stage(
                name,
                request,
                inputs,
                backend=how.backend,
                delivery=delivery if name == StageName.DECODE else None,
                vae_tiling=how.vae_tiling,
            )
            stages.append(report)
            if name == StageName.DENOISE:
                denoised = tensors["latents"]
        delivery.check()
        frames = tensors["frames"] if on_frames is None else no_frames(request, pixels)
        note = {"note": stage_note(how, source=source, given=given)}
        records = {made.stage: {**self.stage_record(made), **note} for made in stages}
        return Result(
            frames=frames,
            latents=denoised,
            report=self.run_report(stages, time.perf_counter() - started),
            request=request,
            origin=self.origin(records),
        )

    def origin(self, stages: Mapping[str, Mapping[str, Any]]) -> Origin:
        """What sidecars say of a run whose stages have these records."""
        first = self.mesh.devices.flat[0]
        return Origin(
            model=self.port.name,
            variant=self.variant.name,
            weights=self.checkpoint.reference,
            # Not of this session, whose weights a result must not keep.
            fingerprints=partial(self.checkpoint.fingerprints, self.port.folders),
            stages=stages,
            devices={
                "backend": self.components.platform,
                "devices": int(self.mesh.devices.size),
                "device_kind": str(first.device_kind),
            },
        )

    def _asked(
        self, prompt: Any, asked: dict[str, Any]
    ) -> tuple[Request, Source | None, dict[str, Any]]:
        """The request, what it starts from, and the tensors given."""
        written = self.port.stages[0].writes
        tensors = {spec.name for spec in written if spec.role}
        known = defaults_of(Asked).keys() - {"options"}
        given = {k: asked.pop(k) for k in list(asked) if k in tensors}
        options = {k: asked.pop(k) for k in list(asked) if k not in known}
        self.requests.options(options)
        given = check_given(written, prompt, asked.get("negative_prompt"), given)
        image, video = asked.pop("image", None), asked.pop("video", None)
        frames = asked.get("num_frames")
        frames = self.variant.num_frames if frames is None else frames
        source = read_source(image, video, frames)
        request = self.request(
            source=source,
            prompt=prompt,
            options=options,
            videos=len(next(iter(given.values()))) if given else None,
            **asked,
        )
        return request, source, given

    def _needed(
        self, request: Request, pixels: dict[str, Any], given: dict[str, Any]
    ) -> list[StageName]:
        """The stages to run: encode is spared where all it makes was given."""
        roles = {"prompt", *(["negative"] if self.port.guided(request) else [])}
        complete = not pixels and all(
            spec.name in given
            for spec in self.port.stages[0].writes
            if spec.role in roles
        )
        return list(StageName)[complete:]

    # ------------------------------------------------------------- one stage

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

        Raises:
            VideoError: a tensor that the stage made is not finite.
        """
        names = [stage.name for stage in self.port.stages]
        if name not in names:
            raise UsageError(
                f"no stage is called {name!r}; there are {', '.join(names)}"
            )
        if self._closed:
            raise UsageError("the session is closed; open another with tpuport.load")
        stage = self.port.stage(name)
        how = self._how(backend, vae_tiling)
        rules.check(Known(settings=how, port=self.port, request=request, stages=[name]))
        upstream = how.backend == Backend.DIFFUSERS
        on_host = stage is self.port.stages[0] and self.encode_on == Place.HOST
        if not upstream and not on_host:
            ran = self._on_mesh(stage, request, inputs, delivery, how.vae_tiling)
            self._check_finite(stage, request, ran[0])
            return ran
        for component in stage.components_for(request):
            chosen = self.port.chosen.get(component)
            if chosen is not None and upstream:
                raise UsageError(
                    f"{component} {chosen!r} is not upstream's, which {name} runs with "
                    "backend diffusers: leave it out, or use backend tpuport"
                )
            if chosen is not None:
                self.reporter.say(
                    f"{name} runs on the host: its {component} is upstream's, not "
                    f"{chosen}"
                )
        device = host_device() if upstream else "cpu"
        if self.mesh.size > 1:
            self.reporter.say(
                f"{name} runs upstream's code on {device}, not on the mesh"
            )
        # The same refusals as on the mesh; upstream would fill a missing tensor with
        # random numbers and warn.
        self._check_files(stage, request)
        with self.reporter.watched():
            ran = self.executor.run_upstream(
                stage, request, inputs, device, delivery, how.vae_tiling
            )
        self._check_finite(stage, request, ran[0])
        return ran

    def _check_finite(
        self, stage: Stage, request: Request, made: Mapping[str, Any]
    ) -> None:
        """Refuse what a stage made for the next one where it is NaN or infinite."""
        for name in (spec.name for spec in stage.writes if spec.name in made):
            if not bool(torch.isfinite(made[name]).all()):
                ran = stage.components_for(request)
                raise not_finite(stage.name, name, "", ran, self.dtype)

    def _on_mesh(
        self, stage: Stage, request: Request, *how: Any
    ) -> tuple[dict[str, Any], StageReport]:
        """:meth:`Executor.run`; where a program does not fit, say what does."""
        try:
            return self.executor.run(stage, request, *how)
        except DoesNotFitError as error:
            if stage.tiles is not None:
                raise  # which says what to do about it
            weights = self.components.held_bytes(stage.components)[1]
            share = max(error.limit - weights, 0) / (error.bytes - weights)
            then = f"; {rules.what_fits(request, self.variant, share)}"
            raise DoesNotFitError(
                error.name, error.bytes, error.limit, f"{then}, or use more devices"
            ) from error

    # ---------------------------------------------------------- run directory

    def open_run(self, path: Path, request: Request) -> RunDirectory:
        """The run directory of a request: a new one, or one made for the same.

        Raises:
            ArtifactError: it is of another model, other settings or other weights.
        """
        weights = {name: self._fingerprint(name) for name in self.port.folders}
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
        source: Source | None = None,
        inputs: Mapping[str, torch.Tensor] | None = None,
        extra: Mapping[str, torch.Tensor] | None = None,
        note: Mapping[str, Any] | None = None,
        pixels: str = Pixels.FLOAT32,
        on_frames: Sink | None = None,
    ) -> tuple[dict[str, Any], StageReport]:
        """Run one stage on a run directory: its inputs are read, its tensors written.

        Args:
            run: opened by :meth:`open_run` or :meth:`RunDirectory.open`.
            name: of the stage.
            source: what encode starts from, where the run has one.
            inputs: of the stage, where they were read before; see :meth:`read_inputs`.
            extra: tensors written beside the stage's own, such as initial latents.
            note: JSON kept with the stage's report in run.json, as ``"note"``.
            pixels, on_frames: of decode; see :meth:`Session.generate`.

        Returns:
            As :meth:`run_stage`. The frames of decode are checked, not written; with
            ``on_frames`` they are not returned.

        Raises:
            ArtifactError: an input is missing, altered or of other weights, or a file
                that this run did not make is where the stage's own goes.
            VideoError: latents or frames are not finite, constant or black.
        """
        request = recorded_request(self.port, run.settings, run.file)
        self.check(request)
        run.check_request(model=self.port.name, variant=self.variant.name)
        stage = self.port.stage(name)
        if stage.writes:
            run.check_place(name)
        for folder in (*stage.components_for(request), *stage.files):
            if self.checkpoint.has(folder):
                run.check_weights(folder, self.checkpoint.fingerprint(folder))
        if name == StageName.ENCODE:
            inputs = self._source_pixels(request, source)
        elif inputs is None:
            inputs = self.read_inputs(run, name)
        delivery = Delivery(pixels, on_frames)
        tensors, report = self.run_stage(name, request, inputs, delivery=delivery)
        if stage.writes:
            dropped = run.invalidate_after(name)
            if dropped:
                self.reporter.say(
                    f"{name} was run again: {' and '.join(dropped)} must follow"
                )
            run.write_stage(
                name,
                {**tensors, **(extra or {})},
                stage.writes,
                {**self.stage_record(report), "note": dict(note or {})},
            )
        else:
            delivery.check()
        return tensors, report

    def read_inputs(self, run: RunDirectory, name: str) -> dict[str, torch.Tensor]:
        """The tensors that a stage after encode reads in a run directory.

        Raises:
            ArtifactError: the stage before is not finished, or its file not usable.
        """
        request = recorded_request(self.port, run.settings, run.file)
        before = self.port.stages[list(StageName).index(StageName(name)) - 1]
        return run.read_stage(before.name, before.writes, self._sizes(request))

    def _sizes(self, request: Request) -> dict[str, int]:
        """Named sizes of the tensors that stages hand on, by the request and configs.

        The dims of the latents, and what the denoisers' configs name.
        """
        configs = [self.checkpoint.config(name) for name in self.port.denoisers]
        sizes = {k: v for c in configs for k, v in c.items() if isinstance(v, int)}
        written = self.port.stages[-2].writes
        (dims,) = (spec.shape for spec in written if spec.name == "latents")
        shape = self.port.latent_shape(request, self.checkpoint)
        sizes |= {str(dim): size for dim, size in zip(dims, shape, strict=True)}
        return {**sizes, str(dims[0]): len(request.prompts)}

    def _source_pixels(
        self, request: Request, source: Source | None
    ) -> dict[str, torch.Tensor]:
        """The pixels that encode reads, found to be those of the request, if any."""
        if not request.sources:
            return {}
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
            "sharding": self.settings.sharding,
            "blocks": self.port.blocks,
            # Upstream's own code has its own.
            "implementations": {}
            if report.backend == Backend.DIFFUSERS
            else choices(self.port, self.port.stage(report.stage).components),
            "platform": self.components.platform,
        }

    def run_report(
        self, stages: Sequence[StageReport], total_seconds: float
    ) -> RunReport:
        """The report of a run made of these stages."""
        # Of the components that some stage ran; upstream's own code has its own.
        ran = [
            name
            for stage in stages
            if stage.backend != Backend.DIFFUSERS
            for name in self.port.stage(stage.stage).components
        ]
        return RunReport(
            model=self.port.name,
            variant=self.variant.name,
            weights=self.checkpoint.reference,
            platform=self.components.platform,
            mesh=str(self.mesh_spec),
            devices=int(self.mesh.devices.size),
            dtype=self.dtype,
            blocks=self.port.blocks,
            stages=tuple(stages),
            total_seconds=total_seconds,
            peak_host_bytes=reports.peak_host_bytes(),
            peak_device_bytes=reports.peak_device_bytes(list(self.mesh.devices.flat)),
            implementations=choices(self.port, dict.fromkeys(ran)),
        )
