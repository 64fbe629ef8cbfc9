"""The only orchestrator: a checkpoint, a mesh, and the stages run on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from tpuport.core import reports as reports
from tpuport.core.arrays import to_torch
from tpuport.core.enums import Backend
from tpuport.core.reports import RunReport, StageReport
from tpuport.core.run.frame_delivery import Delivery, Sink
from tpuport.core.run.result import Result as Result
from tpuport.core.run.result import latents_digest as latents_digest
from tpuport.core.run.result import no_frames
from tpuport.core.run.stage_runner import StageRunner
from tpuport.core.spec import rules
from tpuport.core.spec.choices import choices
from tpuport.core.spec.request import check_given
from tpuport.core.spec.rules import Known
from tpuport.core.spec.run_settings import Asked, RunSettings, defaults_of


class Session(StageRunner):
    """One checkpoint on one mesh. Made by :func:`tpuport.load`.

    Used in a ``with`` block it frees its weights and compiled programs at the end, also
    after an error. Patches and op overrides are active only while a program is traced,
    so upstream code behaves as always beside an open session.
    """

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

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        *,
        latents: torch.Tensor | None = None,
        backend: str = "tpuport",
        pixels: str = "float32",
        on_frames: Sink | None = None,
        vae_tiling: str | None = None,
        **asked: Any,
    ) -> Result:
        """Make videos, as one call of the upstream pipeline would.

        Keywords that are not parameters are what is asked for: ``negative_prompt``,
        ``height``, ``width``, ``num_frames``, ``num_inference_steps``,
        ``guidance_scale``, ``seed``, ``fps``, ``image``, ``video``, ``strength``,
        ``resolution``, ``aspect_ratio``, ``step_cache``, and options of the model.

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
            asked: the above; options such as ``scheduler="ddim"``; also tensors in
                place of prompts, by the names that the encode stage writes:
                ``prompt_embeds``, ``negative_prompt_embeds`` and what belongs to them.

        Returns:
            :class:`Result`.

        Raises:
            UsageError: a value is off its rule, or prompts and embeddings exclude each
                other.
            VideoError: latents or frames are not finite, constant or black.
        """
        started = time.perf_counter()
        how = RunSettings.read(
            {"backend": backend, "vae_tiling": vae_tiling}, named=str
        )
        tiling = None if vae_tiling is None else how.vae_tiling
        delivery = Delivery(pixels, on_frames)
        encode = self.port.stages[0]
        tensor_names = {spec.name for spec in encode.writes if spec.role}
        known = defaults_of(Asked).keys() - {"options"}
        given = {k: asked.pop(k) for k in list(asked) if k in tensor_names}
        options = {k: asked.pop(k) for k in list(asked) if k not in known}
        self.requests.options(options)
        embeds = check_given(encode.writes, prompt, asked.get("negative_prompt"), given)
        request, sources = self.requests.with_pixels(
            prompt=prompt,
            options=options,
            videos=len(next(iter(embeds.values()))) if embeds else None,
            **asked,
        )
        if latents is not None:
            latents = to_torch(latents)
            self.check(request, latents)
        names = [stage.name for stage in self.port.stages]
        rules.check(Known(settings=how, port=self.port, request=request, stages=names))
        needed = {"prompt", *(["negative"] if self.port.guided(request) else [])}
        complete = not sources and all(
            spec.name in embeds for spec in encode.writes if spec.role in needed
        )
        needed_stages = names[1:] if complete else names
        self.check_weights(needed_stages, request)
        if how.backend != Backend.DIFFUSERS:
            made_by = [self.port.stage(name) for name in needed_stages]
            self.executor.check_built(request, made_by, tiling)
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
            vae_tiling=tiling,
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
