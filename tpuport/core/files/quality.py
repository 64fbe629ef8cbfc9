"""How near one video is to another: PSNR and SSIM.

Used to say what a shortcut costs, against the exact run of the same seed.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tpuport.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

#: Side of the window of SSIM in pixels; smaller frames get the largest that fits.
WINDOW = 7
#: The smallest window whose variance means anything.
MIN_WINDOW = 3


def compare(video: Any, exact: Any) -> dict[str, float | None]:
    """PSNR and SSIM of ``video`` against ``exact``, both [N, T, Y, X, 3] in [0, 1].

    Returns:
        ``psnr``, peak signal-to-noise ratio in dB, ``None`` for identical videos (it is
        infinite, which JSON lacks); ``ssim``, structural similarity, at most 1.

    Raises:
        UsageError: the videos are of different shapes, not in [0, 1], or too small.
    """
    noise = psnr(video, exact)
    return {
        "psnr": None if math.isinf(noise) else noise,
        "ssim": ssim(video, exact),
    }


def psnr(video: Any, exact: Any) -> float:
    """``10 log10(1 / mean squared error)`` in dB over all pixels of all videos.

    One mean over everything: a mean of the frames' PSNR would be infinite as soon as
    one frame is exact.

    Raises:
        UsageError: see :func:`compare`.
    """
    from skimage.metrics import peak_signal_noise_ratio

    a, b = _pair(video, exact)
    if (a == b).all():
        return math.inf
    return float(peak_signal_noise_ratio(b, a, data_range=1.0))


def ssim(video: Any, exact: Any) -> float:
    """Mean SSIM of all frames of all videos, each over its colour channels.

    The window is uniform, 7 x 7 pixels, with the sample covariance: scikit-image's
    ``structural_similarity`` as it stands. A frame smaller than that gets the largest
    odd window that fits.

    Raises:
        UsageError: see :func:`compare`; also frames smaller than 3 pixels.
    """
    import numpy as np
    from skimage.metrics import structural_similarity

    a, b = _pair(video, exact)
    side = min(a.shape[2:4])
    if side < MIN_WINDOW:
        raise UsageError(
            f"frames of {a.shape[2]}x{a.shape[3]} pixels have no SSIM; at least "
            f"{MIN_WINDOW}x{MIN_WINDOW} are needed"
        )
    window = min(WINDOW, side - (side + 1) % 2)
    values = [
        structural_similarity(x, y, win_size=window, data_range=1.0, channel_axis=-1)
        for x, y in zip(
            a.reshape(-1, *a.shape[2:]), b.reshape(-1, *b.shape[2:]), strict=True
        )
    ]
    return float(np.mean(values))


def _pair(video: Any, exact: Any) -> tuple[np.ndarray, np.ndarray]:
    """Both videos in float64."""
    import numpy as np

    a, b = np.asarray(video), np.asarray(exact)
    if a.shape != b.shape or a.ndim != 5 or a.shape[-1] != 3 or not a.size:
        raise UsageError(
            f"videos of shapes {a.shape} and {b.shape} cannot be compared; both must "
            "be [N, T, Y, X, 3]"
        )
    for array in (a, b):
        # Also true for NaN.
        if array.dtype.kind != "f" or not (array.min() >= 0 and array.max() <= 1):
            raise UsageError(
                f"a video of {array.dtype} from {array.min()} to {array.max()} cannot "
                "be compared; both must be floats in [0, 1]"
            )
    return a.astype(np.float64), b.astype(np.float64)
