"""The only orchestrator: a checkpoint, a mesh, and the stages run on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import torch

from tpuport.core import reports as reports
from tpuport.core.arrays import to_torch
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.programs.components import Components
from tpuport.core.programs.program_store import Programs
from tpuport.core.reports import Reporter, RunReport, StageReport
from tpuport.core.run.executor import Executor
from tpuport.core.run.frame_delivery import Delivery, Sink
from tpuport.core.run.inspection import Inspection
from tpuport.core.run.result import Result as Result
from tpuport.core.run.result import latents_digest as latents_digest
from tpuport.core.run.result import no_frames
from tpuport.core.run.stage_runner import StageRunner
from tpuport.core.spec.choices import choices
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.request import check_given
from tpuport.core.spec.tiling import check_choice
from tpuport.core.spec.variant import Variant
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import UsageError


class Session(StageRunner):
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
        inspection: what the stages are looked at with.
        vae_tiling: whether decode runs in tiles, as upstream's ``enable_tiling()``:
            ``"on"``, ``"off"``, or ``"auto"`` where it would not fit otherwise.
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
        inspection: Inspection | None = None,
        vae_tiling: str = "auto",
        reporter: Reporter | None = None,
    ) -> None:
        if encode_on not in ("device", "host"):
            raise UsageError(f"encode_on {encode_on!r}: choose device or host")
        inspection = inspection or Inspection()
        inspection.check([stage.name for stage in port.stages])
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
        self.executor = Executor(
            self.components,
            keep_loaded=keep_loaded,
            programs=made,
            inspection=inspection,
            vae_tiling=vae_tiling,
        )
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

        heads = {
            name: component.heads(self.checkpoint.config(name))
            for name, component in self.port.components.items()
            if component.heads is not None
            and (self.checkpoint.folder / name / "config.json").is_file()
            and not (name in self._encoders() and self.encode_on == "host")
        }
        MeshSpec.parse(dict(self.mesh.shape)).validate(heads=heads, batch=None)

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
        pixels: str = "float32",
        on_frames: Sink | None = None,
        vae_tiling: str | None = None,
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
            pixels: of the frames: ``"float32"`` in [0, 1], or ``"uint8"``, which are
                made on the device.
            on_frames: ``on_frames(first, frames)`` is called with frames [B, F, Y, X,
                3] of videos ``first`` on as they are made, in their order, so that the
                host never holds a whole video; :class:`Result` then has none. They
                are checked when all are made: what was done with them before a
                VideoError is to be thrown away.
            vae_tiling: ``"auto"``, ``"on"`` or ``"off"`` in place of the session's.
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
        delivery = Delivery(pixels, on_frames)
        if vae_tiling is not None:
            check_choice(vae_tiling)
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
        needed_stages = names[1:] if complete else names
        self.check_weights(needed_stages, request)
        if backend != "diffusers":
            made_by = [self.port.stage(name) for name in needed_stages]
            self.executor.check_built(request, made_by, vae_tiling)
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
        decoded, report = self.run_stage(
            "decode",
            request,
            tensors,
            backend=backend,
            delivery=delivery,
            vae_tiling=vae_tiling,
        )
        stages.append(report)
        delivery.check()
        return Result(
            frames=decoded["frames"]
            if on_frames is None
            else no_frames(request, pixels),
            latents=tensors["latents"],
            report=self.run_report(stages, time.perf_counter() - started),
            request=request,
        )

    def run_report(
        self, stages: Sequence[StageReport], total_seconds: float
    ) -> RunReport:
        """The report of a run made of these stages."""

        # Of the components that some stage ran; upstream's own code has its own.
        ran = [
            name
            for stage in stages
            if stage.backend != "diffusers"
            for name in self.port.stage(stage.stage).components
        ]
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
            implementations=choices(self.port, dict.fromkeys(ran)),
        )
