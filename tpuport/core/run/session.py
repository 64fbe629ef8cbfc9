"""The only orchestrator: a checkpoint, a mesh, and the stages run on them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from tpuport.core import reports as reports
from tpuport.core.arrays import to_torch
from tpuport.core.enums import Backend, StageName
from tpuport.core.reports import RunReport, StageReport
from tpuport.core.run.frame_delivery import Delivery, Sink
from tpuport.core.run.result import Result as Result
from tpuport.core.run.result import latents_digest as latents_digest
from tpuport.core.run.result import no_frames
from tpuport.core.run.stage_runner import StageRunner
from tpuport.core.spec import rules
from tpuport.core.spec.choices import choices
from tpuport.core.spec.request import Request, check_given
from tpuport.core.spec.rules import Known
from tpuport.core.spec.run_settings import Asked, defaults_of


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
        backend: str | None = None,
        pixels: str = "float32",
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
        request, sources, given = self._asked(prompt, asked)
        if latents is not None:
            latents = to_torch(latents)
            self.check(request, latents)
            given = {**given, "initial_latents": latents}
        names = self._needed(request, sources, given)
        rules.check(
            Known(settings=how, port=self.port, request=request, stages=list(StageName))
        )
        self.check_weights(names, request)
        if how.backend != Backend.DIFFUSERS:
            needed = [self.port.stage(name) for name in names]
            self.executor.check_built(request, needed, how.vae_tiling)
        stages: list[StageReport] = []
        tensors: dict[str, Any] = sources
        for name in names:
            # As upstream: what was given stands, the rest is encoded.
            inputs = {**tensors, **given} if name == StageName.DENOISE else tensors
            last = name == StageName.DECODE
            tensors, report = self.run_stage(
                name,
                request,
                inputs,
                backend=how.backend,
                delivery=delivery if last else None,
                vae_tiling=how.vae_tiling,
            )
            stages.append(report)
            if name == StageName.DENOISE:
                made = tensors["latents"]
        delivery.check()
        frames = tensors["frames"] if on_frames is None else no_frames(request, pixels)
        return Result(
            frames=frames,
            latents=made,
            report=self.run_report(stages, time.perf_counter() - started),
            request=request,
        )

    def _asked(
        self, prompt: Any, asked: dict[str, Any]
    ) -> tuple[Request, dict[str, Any], dict[str, Any]]:
        """The request, the pixels that it starts from, and the tensors given."""
        written = self.port.stages[0].writes
        tensors = {spec.name for spec in written if spec.role}
        known = defaults_of(Asked).keys() - {"options"}
        given = {k: asked.pop(k) for k in list(asked) if k in tensors}
        options = {k: asked.pop(k) for k in list(asked) if k not in known}
        self.requests.options(options)
        given = check_given(written, prompt, asked.get("negative_prompt"), given)
        request, pixels = self.requests.with_pixels(
            prompt=prompt,
            options=options,
            videos=len(next(iter(given.values()))) if given else None,
            **asked,
        )
        return request, pixels, given

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
