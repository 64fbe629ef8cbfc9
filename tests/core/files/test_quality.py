"""PSNR and SSIM: known values, the formulas, and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tpuport.core.files.quality import compare
from tpuport.errors import UsageError

RNG = np.random.default_rng(0)
VIDEO = RNG.uniform(0.2, 0.8, (2, 3, 16, 24, 3)).astype(np.float32)


def test_identical_videos() -> None:
    found = compare(VIDEO, VIDEO.copy())
    assert json.dumps(found, allow_nan=False) == '{"psnr": null, "ssim": 1.0}'


def test_psnr_is_known_and_of_the_mean_error_of_everything() -> None:
    found = compare(VIDEO + np.float32(0.01), VIDEO)["psnr"]
    assert found == pytest.approx(40.0, abs=1e-3)
    # One video exact, the other 0.1 off: half the squared error, not a mean of dB.
    other = VIDEO.copy()
    other[1] += np.float32(0.1)
    expected = 20.0 + 10 * math.log10(2)
    assert compare(other, VIDEO)["psnr"] == pytest.approx(expected, abs=1e-4)


def ssim_of_a_frame(x: np.ndarray, y: np.ndarray, window: int) -> float:
    """Wang et al. 2004 with a uniform window, written out, of [Y, X, 3]."""
    scores = []
    for row in range(x.shape[0] - window + 1):
        for column in range(x.shape[1] - window + 1):
            for channel in range(3):
                at = np.s_[row : row + window, column : column + window, channel]
                a, b = x[at].astype(np.float64), y[at].astype(np.float64)
                cov = np.cov(a.ravel(), b.ravel())
                means = 2 * a.mean() * b.mean() + 0.01**2
                variances = cov[0, 0] + cov[1, 1] + 0.03**2
                scores.append(
                    means
                    * (2 * cov[0, 1] + 0.03**2)
                    / (a.mean() ** 2 + b.mean() ** 2 + 0.01**2)
                    / variances
                )
    return float(np.mean(scores))


@pytest.mark.parametrize(
    ("rows", "columns", "window"),
    [(9, 11, 7), (7, 8, 7), (6, 9, 5), (5, 5, 5), (4, 9, 3), (3, 3, 3)],
)
def test_ssim_is_the_formula_and_small_frames_get_a_smaller_window(
    rows: int, columns: int, window: int
) -> None:
    exact = RNG.uniform(0, 1, (1, 2, rows, columns, 3)).astype(np.float32)
    noise = RNG.normal(0, 0.05, exact.shape).astype(np.float32)
    video = np.clip(exact + noise, 0, 1)
    frames = zip(video[0], exact[0], strict=True)
    expected = np.mean([ssim_of_a_frame(x, y, window) for x, y in frames])
    assert compare(video, exact)["ssim"] == pytest.approx(float(expected), abs=1e-9)
    assert expected < 0.999


@pytest.mark.parametrize(
    ("video", "exact", "message"),
    [
        (VIDEO, VIDEO[:1], r"\(2, 3, 16, 24, 3\) and \(1, 3, 16, 24, 3\)"),
        (VIDEO[0], VIDEO[0], r"both must be \[N, T, Y, X, 3\]"),
        (VIDEO[..., :1], VIDEO[..., :1], r"both must be \[N, T, Y, X, 3\]"),
        (VIDEO[:0], VIDEO[:0], r"both must be \[N, T, Y, X, 3\]"),
        (VIDEO, VIDEO * 2, "both must be floats in"),
        (VIDEO - 1, VIDEO, "both must be floats in"),
        (VIDEO * np.nan, VIDEO, "from nan to nan"),
        ((VIDEO * 255).astype(np.uint8), VIDEO, "a video of uint8"),
    ],
    ids=["shape", "dims", "channels", "empty", "above", "below", "nan", "uint8"],
)
def test_what_cannot_be_compared_is_refused(
    video: np.ndarray, exact: np.ndarray, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        compare(video, exact)


def test_frames_too_small_for_any_window_have_no_ssim() -> None:
    small = VIDEO[:, :, :2]
    with pytest.raises(UsageError, match="frames of 2x24 pixels have no SSIM"):
        compare(small, small)
