"""What a run made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tpuport.core.files.outputs import VideoFiles, plan_outputs
from tpuport.core.files.video_file import check_length
from tpuport.core.reports import RunReport
from tpuport.core.run.sidecar import Origin
from tpuport.core.spec.request import Request
from tpuport.core.spec.run_settings import python_words
from tpuport.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run made.

    Attributes:
        frames: array of shape [N, T, Y, X, 3], N videos of T frames: float32 in [0, 1],
            or uint8 where that was asked for. Of no frames (T is 0) where ``on_frames``
            took them.
        latents: float32 tensor, what upstream returns for ``output_type="latent"``.
        report: what it took.
        request: the settings in full, defaults filled in.
        origin: where and how it was made.
    """

    frames: np.ndarray
    latents: torch.Tensor
    report: RunReport
    request: Request
    origin: Origin

    @python_words()
    def save(self, out: str | Path, *, overwrite: bool = False) -> list[Path]:
        """Write the videos, each with the JSON that ``tpuport replay`` reads.

        Args:
            out: ``.mp4``, ``.webm`` or ``.gif``, or a folder of PNGs with / at the end;
                a name without suffix is an mp4. Several videos are numbered.
            overwrite: replace a video that is there. Without it the video goes to the
                next free name, such as ``fox-2.mp4``.

        Returns:
            where each video went.

        Raises:
            OutputError: a video cannot be written, or would replace what it is made
                from.
            UsageError: there are no frames, since ``on_frames`` took them.
        """
        count, frames = self.frames.shape[:2]
        if not frames:
            raise UsageError(
                f"{out}: there are no frames to write, since on_frames took them"
            )
        outputs = plan_outputs(
            out, count, inputs=self.origin.inputs(), overwrite=overwrite
        )
        for path in outputs.paths:
            check_length(path, outputs.kind, frames, self.request.fps)
        with VideoFiles(outputs, self.request.fps, frames) as files:
            files.take(0, self.frames)
            describe = self.origin.describe
            made = files.publish(
                partial(describe, self.request, self.latents, self.report)
            )
        return [video.path for video in made]


def no_frames(request: Request, pixels: str) -> np.ndarray:
    """The frames of a result whose frames were taken as they were made."""
    shape = (len(request.prompts), 0, request.height, request.width, 3)
    return np.empty(shape, pixels)
