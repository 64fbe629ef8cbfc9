"""Previews of a call of a pipeline: when asked for, or beside the steps that follow."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from tpuport.core.files.atomic import one_line
from tpuport.core.preview.decode_input import DecodeInput, FirstStep, NoPreviewError
from tpuport.core.preview.latent_colours import LatentColours
from tpuport.core.reports import Reporter
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.core.seam.journal import Journal
from tpuport.core.seam.values import tensors_in

#: Makes previews beside the run.
THREAD = "tpuport-preview"
#: Seconds between two previews, at least.
_PAUSE = 1.0
#: The share of the time that previews take of a core, at most.
SHARE = 0.02


class Preview:
    """Makes frames of the latents of one call of a pipeline.

    Hears the call's first step, so it is made before the call.

    Args:
        pipeline: about to be called.
        arguments: of the call.
        journal: hears of the calls.
        folder: where fits are kept; ``None`` to keep none.
    """

    def __init__(
        self,
        pipeline: Any,
        arguments: Mapping[str, Any],
        journal: Journal,
        folder: Path | None = None,
    ) -> None:
        self._first = FirstStep(pipeline, arguments, journal)
        self._journal, self._folder = journal, folder
        self._decode: DecodeInput | None = None
        self._colours: LatentColours | None = None
        self.on_step: Callable[[torch.Tensor], None] = lambda latents: None
        journal.on_answer, journal.on_result = self._first.answered, self._stepped

    def __call__(self, latents: torch.Tensor) -> np.ndarray:
        """Frames of what a step gave, or of what upstream gives to a callback.

        Args:
            latents: in the form of a step's result, packed or not.

        Returns:
            uint8 [frames, height, width, 3]: a frame for each frame of the latents, and
            a pixel for each of their pixels. Several videos come one after the other.

        Raises:
            NoPreviewError: latents of the pipeline cannot be shown.
        """
        self.prepare()
        return self.frames(_reading(latents)())

    def _stepped(self, scheduler: Any, result: Any) -> None:
        if scheduler is not self._first.scheduler:
            return
        if not self._first.over:
            self._first.stepped(result)
        self.on_step(tensors_in(result)[0])

    @property
    def heard(self) -> bool:
        return self._first.over

    def prepare(self, load: Callable[[str], None] = lambda name: None) -> None:
        """Find what is decoded, and its colours, once; within the call of the pipeline.

        Args:
            load: gives a component its weights.

        Raises:
            NoPreviewError: as of a call.
        """
        if self._colours is None:
            self._decode = self._first.decode_input()
            load(self._decode.name)
            self._colours = LatentColours.of(self._decode, self._folder)
            self._decode = self._decode.alone()
            self._first.forget()

    def frames(self, latents: torch.Tensor) -> np.ndarray:
        """As of a call, once prepared; latents are on the host."""
        assert self._decode is not None
        assert self._colours is not None
        return self._colours.frames(self._decode.of(latents))

    def close(self) -> None:
        """Hear of no more calls."""
        for name in ("on_answer", "on_result"):
            setattr(self._journal, name, lambda *told: None)


class PreviewsBeside:
    """Shows frames now and then while the block lasts, beside the steps.

    Steps wait for nothing but :meth:`Preview.prepare`, after the first: patches are in
    place for all threads while the run traces, so the fit is made in the run's own.
    Latents are copied to the host once a second at most, and so seldom that frames take
    a fiftieth of the time of one core. What goes wrong is told once, and the run goes
    on.

    Args:
        preview: of the call under way.
        show: takes frames, as of :class:`Preview`.
        load: gives a component its weights.
        wanted: whether a step is the run's own, and none that is given back.
        reporter: told why there is no preview.
    """

    def __init__(
        self,
        preview: Preview,
        show: Callable[[np.ndarray], None],
        reporter: Reporter,
        *,
        load: Callable[[str], None] = lambda name: None,
        wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        self._preview, self._show, self._reporter = preview, show, reporter
        self._load, self._wanted = load, wanted
        self._given: queue.SimpleQueue[Callable[[], torch.Tensor] | None]
        self._given = queue.SimpleQueue()
        self._free_at = 0.0
        self._over = False
        self._thread: threading.Thread | None = None
        preview.on_step = self._stepped

    def __enter__(self) -> PreviewsBeside:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._preview.close()
        if error is None and not self._preview.heard:
            self._end(NoPreviewError("the pipeline's own scheduler made no step"))
        self._given.put(None)
        if self._thread is not None:
            self._thread.join()

    def _stepped(self, latents: torch.Tensor) -> None:
        early = time.monotonic() < self._free_at
        if self._over or early or not self._wanted():
            return
        if self._thread is None:
            try:
                with self._reporter.timed("preparing the preview"):
                    self._preview.prepare(self._load)
            except Exception as error:  # weights that are not there, say
                self._end(error)
                return
            self._thread = threading.Thread(target=self._work, name=THREAD, daemon=True)
            self._thread.start()
        self._free_at = math.inf
        self._given.put(_reading(latents))

    def _end(self, error: Exception) -> None:
        self._over = True
        self._reporter.say(f"no preview: {one_line(error)}")

    def _work(self) -> None:
        try:
            while (read := self._given.get()) is not None:
                latents = read()
                began = time.thread_time()
                self._show(self._preview.frames(latents))
                took = time.thread_time() - began
                self._free_at = time.monotonic() + max(_PAUSE, took / SHARE)
        except Exception as error:
            self._end(error)


def _reading(latents: torch.Tensor) -> Callable[[], torch.Tensor]:
    """What gives the latents as they are now; a copy where the host has them."""
    if isinstance(latents, DeviceTensor) and not latents.written:
        later = latents.later(always=True)

        def read() -> torch.Tensor:
            found = later()
            assert found is not None
            return found

        return read
    copied = latents.detach().clone()
    return lambda: copied
