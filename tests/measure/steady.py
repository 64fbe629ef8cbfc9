"""A steady run of a ported pipeline on the CPU beside upstream's own, in turns.

    python -m tests.measure.steady [NAME ...]
    python -m tests.measure.steady checkpoints
    python -m tests.measure.steady previews

The examples of tests/pipelines as they are, and with transformers wide enough that
products take most of the time; ten steps, one device, float32, both with all cores. For
each pipeline the middle of the ratios of neighbouring runs, ported to upstream: 1.00 is
as fast. The first run, which compiles, is left out. "Processor" is the ratio of
processor time of both cores, which depends less on what else the machine does. The last
columns are the calls of modules in a wide run, and the middle of the times that a call
spends outside of its program: the port's Python and the copies to and from the device.

With ``checkpoints``, what a step waits for its recording, and what a write takes beside
the steps that follow. UniPC keeps three arrays of the latents' size.

With ``previews``, runs with ``--preview`` and without, in turns: the middle of the
ratios of their steps, what a step waits, what the call ahead takes after the first
step, and what frames take beside the steps.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import jax
import numpy as np
import torch

import tpuport
from tests.pipelines.example import Example, all_examples, difference, made, run
from tpuport.cli.runs.previewed import previewed
from tpuport.cli.shown.pictures import picture_of, png_of
from tpuport.core.drive.driving import driving
from tpuport.core.drive.tape import Tape
from tpuport.core.drive.tape_folder import TapeFolder
from tpuport.core.enums import Backend
from tpuport.core.preview.latent_colours import LatentColours
from tpuport.core.preview.previews import Preview
from tpuport.core.reports import Reporter
from tpuport.core.seam.entry import Entry
from tpuport.core.seam.ported import seam_of
from tpuport.core.seam.program_runs import ProgramRuns

ROUNDS = 7
#: Of denoising. With the examples' two, decoding would take most of the time.
STEPS = 10
#: By pipeline: what is larger in the transformer's config, and in the call.
LARGER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "WanPipeline": (
        {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 2048},
        {"height": 64, "width": 64},
    ),
    "LTXPipeline": (
        {
            "num_attention_heads": 8,
            "attention_head_dim": 64,
            "cross_attention_dim": 512,
        },
        {"height": 64, "width": 64},
    ),
    "CogVideoXPipeline": (
        {"num_attention_heads": 8, "attention_head_dim": 64},
        {"height": 64, "width": 64},
    ),
    "SanaVideoPipeline": (
        {
            "num_attention_heads": 8,
            "attention_head_dim": 64,
            "num_cross_attention_heads": 8,
            "cross_attention_head_dim": 64,
            "cross_attention_dim": 512,
        },
        {"height": 64, "width": 64},
    ),
    "MochiPipeline": (
        {"num_attention_heads": 8, "attention_head_dim": 64},
        {"height": 64, "width": 64},
    ),
    "HunyuanVideoPipeline": (
        {
            "num_attention_heads": 8,
            "attention_head_dim": 64,
            "rope_axes_dim": (16, 24, 24),
        },
        {"height": 64, "width": 64},
    ),
}


def enlarged(one: Example) -> tuple[Any, dict[str, Any]]:
    """The example with a larger transformer, and its call."""
    config, call = LARGER[one.name]
    pipeline, usual = made(one)
    small = pipeline.transformer
    torch.manual_seed(0)
    large = type(small).from_config({**small.config, **config}).eval()
    pipeline.register_modules(transformer=large)
    return pipeline, usual | call


def seconds(pipeline: Any, call: dict[str, Any]) -> tuple[float, float]:
    """A run by the clock, and its processor time."""
    started, used = time.perf_counter(), time.process_time()
    run(pipeline, call)
    return time.perf_counter() - started, time.process_time() - used


def on_host(pipeline: Any, call: dict[str, Any]) -> tuple[int, float]:
    """Calls of a ported pipeline, and the seconds of one outside of its program."""
    spent: list[float] = []
    execute, called = ProgramRuns._run, Entry._called

    def timed_execute(self: ProgramRuns, *args: Any) -> Any:
        started = time.perf_counter()
        arrays = jax.block_until_ready(execute(self, *args))
        spent[-1] -= time.perf_counter() - started
        return arrays

    def timed_call(self: Entry, *args: Any) -> Any:
        started = time.perf_counter()
        spent.append(0.0)
        result = called(self, *args)
        spent[-1] += time.perf_counter() - started
        return result

    with (
        mock.patch.object(ProgramRuns, "_run", timed_execute),
        mock.patch.object(Entry, "_called", timed_call),
    ):
        run(pipeline, call)
    return len(spent), statistics.median(spent)


def compared(
    make: Callable[[Example], tuple[Any, dict[str, Any]]], one: Example
) -> list[str]:
    """Upstream's seconds, both ratios, the difference, programs, calls, host time."""
    pipeline, call = make(one)
    call |= {"num_inference_steps": STEPS}
    expected = run(pipeline, call)
    twin, _ = make(one)
    with tpuport.ported(twin, mesh="dp=1", progress=False):
        worst = difference(run(twin, call), expected)
        pairs = [(seconds(pipeline, call), seconds(twin, call)) for _ in range(ROUNDS)]
        calls, host = on_host(twin, call)
        programs = sum(len(e.programs) for e in seam_of(twin).entries.values())
    clock, processor = (
        statistics.median(ported[n] / upstream[n] for upstream, ported in pairs)
        for n in range(2)
    )
    upstream = statistics.median(pair[0][0] for pair in pairs)
    return [
        *(f"{upstream:.2f}", f"{clock:.2f}", f"{processor:.2f}", f"{worst:.0e}"),
        *(f"{programs}", f"{calls}", f"{host * 1e6:.0f}"),
    ]


def row(one: Example) -> str:
    """One line of the table."""
    small, wide = (compared(make, one) for make in (made, enlarged))
    return f"| {' | '.join([one.name, *small[1:3], *wide])} |"


#: Of Wan2.1-14B, 720x1280, 81 frames.
LATENTS = (1, 16, 21, 90, 160)


def checkpoints() -> None:
    """What a step waits for its recording, and what a write takes beside steps."""
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=5.0
    )
    scheduler.set_timesteps(STEPS)
    tape, waits = Tape(), []
    noise = torch.randn(LATENTS)
    latents = torch.randn(LATENTS)
    with tempfile.TemporaryDirectory() as place:
        for timestep in scheduler.timesteps:
            plain = scheduler.step(noise, timestep, latents, return_dict=False)
            began = time.perf_counter()
            (latents,) = tape.step(0, scheduler, lambda plain=plain: plain)
            waits.append(time.perf_counter() - began)
        tape.record()
        began = time.perf_counter()
        TapeFolder(Path(place)).write(tape.recorded)
        wrote = time.perf_counter() - began
        size = sum(file.stat().st_size for file in Path(place).iterdir())
    print(f"recording a step: {statistics.median(waits[3:]):.4f} s")
    print(f"writing a checkpoint of {size / 1e6:.0f} MB: {wrote:.2f} s, beside steps")


def previews() -> None:
    """What a preview takes of the steps of a wide example."""
    pipeline, call = enlarged(all_examples()["WanPipeline"])
    call |= {"num_inference_steps": 100}
    waits: list[float] = []
    ahead: list[float] = []
    beside: list[float] = []

    def timed(spent: list[float], function: Any, clock: Any) -> Any:
        def timing(*args: Any) -> Any:
            began = clock()
            found = function(*args)
            spent.append(clock() - began)
            return found

        return timing

    def once(place: Path | None) -> tuple[float, float]:
        journal = seam_of(pipeline).journal
        with contextlib.ExitStack() as stack:
            if place is not None:
                more = {
                    "cache": place,
                    "files": [place / "a.png"],
                    "reporter": Reporter(),
                }
                shown = previewed(pipeline, call, journal, **more, load=str, tape=None)
                stack.enter_context(shown)
                heard = timed(waits, journal.on_result, time.perf_counter)
                journal.on_result = heard
            drive = stack.enter_context(driving(pipeline, journal, Backend.TPUPORT))
            whole, _ = seconds(pipeline, call)
        return (drive.steps[-1] - drive.steps[1]) / (len(drive.steps) - 2), whole

    frames = timed(beside, Preview.frames, time.thread_time)
    prepare = timed(ahead, Preview.prepare, time.perf_counter)
    with (
        tempfile.TemporaryDirectory() as folder,
        tpuport.ported(pipeline, mesh="dp=1", progress=False),
        mock.patch.object(Preview, "frames", frames),
        mock.patch.object(Preview, "prepare", prepare),
    ):
        once(Path(folder))
        waits.clear()
        pairs = [(once(None), once(Path(folder))) for _ in range(ROUNDS)]
    for number, what in enumerate(("a step", "a run")):
        ratio = statistics.median(
            shown[number] / plain[number] for plain, shown in pairs
        )
        usual = statistics.median(plain[number] for plain, _ in pairs)
        print(f"{what}: {usual:.4f} s; with previews: {ratio:.3f} of it")
    print(f"a step waits: {statistics.median(waits) * 1e6:.0f} us")
    print(
        f"at first use: {ahead[0]:.2f} s; later: {statistics.median(ahead[1:]):.3f} s"
    )
    print(f"frames, beside: {statistics.median(beside) * 1e3:.1f} ms")
    colours, latents = LatentColours(np.ones((17, 3), np.float32)), torch.randn(LATENTS)
    began = time.thread_time()
    png_of(picture_of(colours.frames(latents)))
    print(f"of Wan2.1-14B: {(time.thread_time() - began) * 1e3:.0f} ms")


def main() -> None:
    """Print the table."""
    if sys.argv[1:] == ["previews"]:
        previews()
        return
    if sys.argv[1:] == ["checkpoints"]:
        checkpoints()
        return
    examples = all_examples()
    print(
        "| pipeline | ratio | processor | wide: upstream, s | ratio | processor | "
        "difference | programs | calls | host, us |"
    )
    print("| --- " * 10 + "|")
    for name in sys.argv[1:] or LARGER:
        print(row(examples[name]), flush=True)


if __name__ == "__main__":
    main()
