"""How near one video is to another: PSNR and SSIM.

Used to say what a shortcut costs, against the exact run of the same seed.
"""

from __future__ import annotations

from typing import Any

from tpuport.errors import UsageError

#: Side of the window of SSIM in pixels; smaller frames get the largest that fits.
WINDOW = 7
#: The smallest window whose variance means anything.
MIN_WINDOW = 3


def compare(video: Any, exact: Any) -> dict[str, float | None]:
    """PSNR and SSIM of ``video`` against ``exact``, both [N, T, Y, X, 3] in [0, 1].

    Returns:
        ``psnr``, ``10 log10(1 / mean squared error)`` in dB over all pixels of all
        videos; ``None`` for identical videos (it is infinite, which JSON lacks). One
        mean over everything: a mean of the frames' PSNR would be infinite as soon as
        one frame is exact. ``ssim``, at most 1: the mean of all frames, each over its
        colour channels, with a uniform window of 7 x 7 pixels and the sample
        covariance, as scikit-image has it. A frame smaller than the window gets the
        largest odd window that fits.

    Raises:
        UsageError: the videos are of different shapes, not in [0, 1], or have frames
            smaller than 3 pixels.
    """
    import numpy as np
    from skimage.metrics import peak_signal_noise_ratio, structural_similarity

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
    side = min(a.shape[2:4])
    if side < MIN_WINDOW:
        raise UsageError(
            f"frames of {a.shape[2]}x{a.shape[3]} pixels have no SSIM; at least "
            f"{MIN_WINDOW}x{MIN_WINDOW} are needed"
        )
    a, b = (one.astype(np.float64).reshape(-1, *one.shape[2:]) for one in (a, b))
    window = min(WINDOW, side - (side + 1) % 2)
    values = [
        structural_similarity(x, y, win_size=window, data_range=1.0, channel_axis=-1)
        for x, y in zip(a, b, strict=True)
    ]
    same = bool((a == b).all())
    return {
        "psnr": None if same else float(peak_signal_noise_ratio(b, a, data_range=1.0)),
        "ssim": float(np.mean(values)),
    }
