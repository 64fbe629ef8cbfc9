"""What a run made."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tpuport.core.arrays import dtype_name, to_numpy

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tpuport.core.reports import RunReport
    from tpuport.core.spec.request import Request


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
    """

    frames: np.ndarray
    latents: torch.Tensor
    report: RunReport
    request: Request


def no_frames(request: Request, pixels: str) -> np.ndarray:
    """The frames of a result whose frames were taken as they were made."""
    import numpy as np

    shape = (len(request.prompts), 0, request.height, request.width, 3)
    return np.empty(shape, pixels)


def latents_digest(latents: torch.Tensor) -> str:
    """sha256 of the bytes of a latents tensor, its shape and its dtype."""

    digest = hashlib.sha256()
    digest.update(f"{dtype_name(latents.dtype)} {tuple(latents.shape)}".encode())
    digest.update(to_numpy(latents).tobytes())
    return digest.hexdigest()
