"""The only orchestrator: a checkpoint, a mesh, and the stages run on them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tpuport.core import report as reports
from tpuport.core.arrays import host_device, to_torch
from tpuport.core.components import Components
from tpuport.core.executor import Executor
from tpuport.core.media import Source
from tpuport.core.programs import Programs
from tpuport.core.report import Reporter, RunReport, StageReport
from tpuport.core.request import Request, check_given
from tpuport.core.request_builder import RequestBuilder
from tpuport.core.run_directory import RunDirectory
from tpuport.core.run_record import STAGE_FILES
from tpuport.core.spec import ModelPort, Stage, Variant
from tpuport.core.video import check_frames
from tpuport.errors import UsageError, WeightsError

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch

    from tpuport.core.checkpoint import Checkpoint

BACKENDS = ("tpuport", "diffusers")


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run made.

    Attributes:
        frames: float32 array of shape [N, T, Y, X, 3] in [0, 1]; N videos of T frames.
        latents: float32 tensor, what upstream returns for ``output_type="latent"``.
        report: what it took.
        request: the settings in full, defaults filled in.
    """

    frames: np.ndarray
    latents: torch.Tensor
    report: RunReport
    request: Request


class Session(RequestBuilder):
    """One checkpoint on one mesh. Made by :func:`tpuport.load`.

    Used in a ``with`` block it frees its weights and compiled programs at the end, also
    after an error. Patches and op overrides are active only while a program is traced,
    so upstream code behaves as always beside an open session.

    Args:
        port: the model.
        variant: the defaults and rules in force.
        checkpoint: the weights.
        mesh: the devices.
        dtype: of the weights.
        encode_on: ``"device"`` for the mesh, ``"host"`` for upstream's text encoder on
            the CPU.
        attention: the attention implementation, ``"auto"`` or a name.
        sharding: the layout of the sharding rules.
        keep_loaded: keep weights on the devices between calls of ``generate``.
        compile_cache: folder of the persistent compile cache, or ``None`` for none.
        executables: folder that ``tpuport compile`` made, whose programs are used in
            place of compiling; one that is for another run is refused.
        reporter: told what happens.
    """

    def __init__(
        self,
        port: ModelPort,
        variant: Variant,
        checkpoint: Checkpoint,
        mesh: jax.sharding.Mesh,
        *,
        dtype: str,
        encode_on: str = "device",
        attention: str = "auto",
        sharding: str = "default",
        keep_loaded: bool = True,
        compile_cache: Path | None = None,
        executables: Path | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        if encode_on not in ("device", "host"):
            raise UsageError(f"encode_on {encode_on!r}: choose device or host")
        self.port = port
        self.variant = variant
        self.checkpoint = checkpoint
        self.mesh = mesh
        self.dtype = dtype
        self.encode_on = encode_on
        self.reporter = reporter or Reporter()
        self._closed = False
        self.components = Components(
            port,
            checkpoint,
            mesh,
            dtype=dtype,
            attention=attention,
            layout=sharding,
            reporter=self.reporter,
        )
        made = Programs.of(self.components, compile_cache, executables, self.reporter)
        executor = Executor(self.components, keep_loaded=keep_loaded, programs=made)
        self.executor = executor
        self._check_heads()
        self.executor.programs.check()

    # ------------------------------------------------------------------ scope

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free weights and compiled programs; the session cannot be used after it."""
        self._closed = True
        self.executor.close()

    def _check_heads(self) -> None:
        """Refuse a mesh whose tp does not divide the heads of a component on it."""
        from tpuport.core.mesh import MeshSpec

        heads = {
            name: component.heads(self.checkpoint.config(name))
            for name, component in self.port.components.items()
            if component.heads is not None
            and (self.checkpoint.folder / name / "config.json").is_file()
            and not (name in self._encoders() and self.encode_on == "host")
        }
        MeshSpec.parse(dict(self.mesh.shape)).validate(heads=heads, batch=None)

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
        backend: str = "tpuport",
    ) -> tuple[dict[str, Any], StageReport]:
        """Run one stage on tensors in memory.

        Args:
            name: ``"encode"``, ``"denoise"`` or ``"decode"``.
            request: the whole run.
            inputs: the tensors of the stage before, videos in the leading dim; of
                encode, the pixels of ``request.sources`` as ``image`` or ``video``.
            backend: ``"tpuport"``, or ``"diffusers"`` for plain upstream code on the
                host or its GPU.

        Returns:
            The tensors the stage writes (decode: ``frames``), and its report.
        """
        if name not in [stage.name for stage in self.port.stages]:
            raise UsageError(
                f"no stage is called {name!r}; there are "
                + ", ".join(stage.name for stage in self.port.stages)
            )
        if self._closed:
            raise UsageError("the session is closed; open another with tpuport.load")
        stage = self.port.stage(name)
        if backend not in BACKENDS:
            raise UsageError(
                f"backend {backend!r}: choose one of {', '.join(BACKENDS)}"
            )
        splits = [self.port.components[c].split for c in stage.components]
        if any(splits):
            self._check_backend(request, backend)
        if backend == "diffusers":
            return self._run_upstream(stage, request, inputs, host_device())
        if stage is self.port.stages[0] and self.encode_on == "host":
            return self._run_upstream(stage, request, inputs, "cpu")
        with self.executor.programs.jax_cache():
            return self.executor.run(stage, request, inputs)

    def _run_upstream(
        self,
        stage: Stage,
        request: Request,
        inputs: Mapping[str, torch.Tensor],
        device: str,
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
        return self.executor.run_upstream(stage, request, inputs, device)

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        seed: int | Sequence[int] = 0,
        latents: torch.Tensor | None = None,
        fps: float | None = None,
        image: Any = None,
        video: Any = None,
        strength: float | None = None,
        resolution: str | None = None,
        aspect_ratio: str | None = None,
        step_cache: str | None = None,
        backend: str = "tpuport",
        **options: Any,
    ) -> Result:
        """Make videos, as one call of the upstream pipeline would.

        Args:
            prompt: one, or several for one batch.
            negative_prompt: one for all, or one for each.
            height, width: in pixels. Defaults, like those below, are the variant's.
            num_frames: frames of the video.
            num_inference_steps: denoising steps.
            guidance_scale: at most 1 turns guidance off.
            seed: one (one generator for the batch) or one per video.
            latents: initial noise in place of a seed's, in the pipeline's layout.
            fps: recorded with the result; the model does not see it.
            image: to start from, for image to video: a path, a PIL image or a uint8
                array [Y, X, 3]; or a list with one for each video.
            video: to start from, for video to video: a path, a list of PIL images or a
                uint8 array [F, Y, X, 3]; its first ``num_frames`` frames are used.
            strength: share of the steps that video to video runs.
            resolution, aspect_ratio: a size class such as ``"480p"`` and a ratio such
                as ``"16:9"``, in place of height and width, for models that have them.
            step_cache: such as ``"deepcache"`` or ``"taylorseer:interval=3"``; faster,
                and no longer exact. See docs/step-caching.md.
            backend: ``"diffusers"`` runs plain upstream code.
            options: settings of this model, such as ``scheduler="ddim"``; also tensors
                in place of prompts, by the names that the encode stage writes:
                ``prompt_embeds``, ``negative_prompt_embeds`` and what belongs to them.

        Returns:
            :class:`Result`.

        Raises:
            UsageError: a value is off its rule, or prompts and embeddings exclude each
                other.
            VideoError: latents or frames are not finite, constant or black.
        """
        started = time.perf_counter()
        encode = self.port.stages[0]
        tensor_names = {spec.name for spec in encode.writes if spec.role}
        given = {k: options.pop(k) for k in list(options) if k in tensor_names}
        self._options(options)
        embeds = check_given(encode.writes, prompt, negative_prompt, given)
        request, sources = self._requested(
            image,
            video,
            num_frames,
            prompt=prompt,
            negative_prompt=negative_prompt,
            height=height,
            width=width,
            fps=fps,
            num_inference_steps=num_inference_steps,
            guidance_scale=guidance_scale,
            seed=seed,
            options=options,
            strength=strength,
            resolution=resolution,
            aspect_ratio=aspect_ratio,
            step_cache=step_cache,
            videos=len(next(iter(embeds.values()))) if embeds else None,
        )
        if latents is not None:
            latents = to_torch(latents)
            self.check_latents(request, latents)
        self._check_backend(request, backend)
        names = [stage.name for stage in self.port.stages]
        needed = {"prompt", *(["negative"] if self.port.guided(request) else [])}
        complete = not sources and all(
            spec.name in embeds for spec in encode.writes if spec.role in needed
        )
        self.check_weights(names[1:] if complete else names, request)
        stages: list[StageReport] = []
        if not complete:
            # As upstream: what was given stands, the rest is encoded.
            encoded, report = self.run_stage(
                "encode", request, sources, backend=backend
            )
            stages.append(report)
            embeds = {**encoded, **embeds}
        if latents is not None:
            embeds = {**embeds, "initial_latents": latents}
        tensors, report = self.run_stage("denoise", request, embeds, backend=backend)
        stages.append(report)
        decoded, report = self.run_stage("decode", request, tensors, backend=backend)
        stages.append(report)
        check_frames(decoded["frames"])
        return Result(
            frames=decoded["frames"],
            latents=tensors["latents"],
            report=self.run_report(stages, time.perf_counter() - started),
            request=request,
        )

    def run_report(
        self, stages: Sequence[StageReport], total_seconds: float
    ) -> RunReport:
        """The report of a run made of these stages."""
        from tpuport.core.mesh import MeshSpec

        return RunReport(
            model=self.port.name,
            variant=self.variant.name,
            weights=self.checkpoint.reference,
            platform=self.components.platform,
            mesh=str(MeshSpec.parse(dict(self.mesh.shape))),
            devices=int(self.mesh.devices.size),
            dtype=self.dtype,
            blocks=self.port.blocks,
            stages=tuple(stages),
            total_seconds=total_seconds,
            peak_host_bytes=reports.peak_host_bytes(),
            peak_device_bytes=reports.peak_device_bytes(list(self.mesh.devices.flat)),
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
        backend: str = "tpuport",
        source: Source | None = None,
        extra: Mapping[str, torch.Tensor] | None = None,
        note: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Any], StageReport]:
        """Run one stage on a run directory: its inputs are read, its tensors written.

        Args:
            run: opened by :meth:`open_run` or :meth:`RunDirectory.open`.
            name: of the stage.
            backend: see :meth:`run_stage`.
            source: what encode starts from, where the run has one.
            extra: tensors written beside the stage's own, such as initial latents.
            note: JSON kept with the stage's report in run.json, as ``"note"``.

        Returns:
            As :meth:`run_stage`. The frames of decode are checked, not written.

        Raises:
            ArtifactError: an input is missing, altered or of other weights.
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
        tensors, report = self.run_stage(name, request, inputs, backend=backend)
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
            check_frames(tensors["frames"])
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
        from tpuport.core.mesh import MeshSpec

        return {
            **report.as_dict(),
            "weights": self.checkpoint.reference,
            "dtype": self.dtype,
            "mesh": str(MeshSpec.parse(dict(self.mesh.shape))),
            "sharding": self.components.layout,
            "blocks": self.port.blocks,
            "platform": self.components.platform,
        }


def latents_digest(latents: torch.Tensor) -> str:
    """sha256 of the bytes of a latents tensor, its shape and its dtype."""
    from tpuport.core.arrays import dtype_name, to_numpy

    digest = hashlib.sha256()
    digest.update(f"{dtype_name(latents.dtype)} {tuple(latents.shape)}".encode())
    digest.update(to_numpy(latents).tobytes())
    return digest.hexdigest()
