"""What step caches and bfloat16 cost on the demo, which shows what it is asked for.

    python -m tests.measure.prices [--captions 50] [--steps 50]

Held-out captions, each with its seed, by upstream's own code on the CPU. PSNR and SSIM
are against the exact videos in float32; the judge says how many videos have the colour
and the motion that was asked for (``training/demo/judge.py``). What is printed is the
table in Markdown, row by row as they are measured.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tpuport.core.drive.driving import driving
from tpuport.core.drive.step_caches import standing, step_caches
from tpuport.core.enums import Backend
from tpuport.core.files.quality import compare
from tpuport.core.reports import Reporter
from tpuport.core.seam.journal import Journal
from tpuport.core.spec.step_cache import StepCache
from tpuport.plugins import folder_of, get_model
from training.demo.evaluate import asked, right, shown
from training.demo.judge import judge
from training.demo.model import loaded

CACHES = [
    None,
    StepCache(method="deepcache"),
    *(StepCache(method="taylorseer", order=order) for order in (1, 2)),
]


def row(*cells: str) -> None:
    """Print a row of the table."""
    print("|", " | ".join(cells), "|", flush=True)


def full_steps(cache: StepCache | None, steps: int) -> str:
    """How many of the steps are full."""
    full = steps if cache is None else sum(cache.schedule(steps))
    return f"{full} of {steps}"


def videos(
    pipeline: Any, cache: StepCache | None, texts: Sequence[str], steps: int
) -> list[np.ndarray]:
    """A video of bytes for each text, [frames, height, width, 3]."""
    found = []
    for number, text in enumerate(texts):
        with contextlib.ExitStack() as stack:
            if cache is not None:
                drive = driving(pipeline, Journal(Reporter()), Backend.DIFFUSERS)
                caches = step_caches(pipeline, cache)
                stack.enter_context(standing(caches.modules.values()))
                stack.enter_context(drive).caches = caches
            found += shown(pipeline, [text], steps, seed=number)
    return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captions", type=int, default=50)
    parser.add_argument("--steps", type=int, default=50)
    given = parser.parse_args()
    folder = get_model("cogvideox").variants["demo"].folder(folder_of("cogvideox"))
    assert folder is not None
    wanted, texts = asked(given.captions)
    count = f"{given.captions} captions, {given.steps} steps"
    row(count, "full steps", "PSNR", "SSIM", "colour", "motion")
    row(*["---"] * 6)
    exact: np.ndarray | None = None
    for dtype in (torch.float32, torch.bfloat16):
        pipeline = loaded(folder).to(dtype=dtype)
        pipeline.set_progress_bar_config(disable=True)
        for cache in CACHES:
            made = videos(pipeline, cache, texts, given.steps)
            seen = [judge(video) for video in made]
            shares = [f"{share:.0%}" for share in right(wanted, seen)]
            whole = np.stack(made) / 255.0
            exact = whole if exact is None else exact
            found = compare(whole, exact)
            near = "-" if found["psnr"] is None else f"{found['psnr']:.1f} dB"
            name = f"{cache or 'exact'}, {str(dtype).removeprefix('torch.')}"
            row(
                name,
                full_steps(cache, given.steps),
                near,
                f"{found['ssim']:.3f}",
                *shares,
            )


if __name__ == "__main__":
    main()
