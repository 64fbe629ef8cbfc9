"""Plans beside published measurements of hand-written ports; the table of
docs/log/2026-11-22-plans-against-published-steps.md.

``python -m tests.measure.plans FOLDER`` runs ``tpuport plan`` once for each row that
has no ``NAME.json`` in FOLDER yet (two minutes each on two cores), keeps the document
there, and prints the tables: denoising, where the port's own choices are imitated, and
decode, where ours are planned. None of the measurements was made by this project.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.measure.steps import PLAIN_FLAGS

JAX = "jax:block_q=2048;block_kv=2048;block_kv_compute=1024"
LARGE = ("--model", "hunyuanvideo", "--variant", "1.5-720p-t2v", "--mesh", "tp=8")
CACHED = "deepcache:start=11,end=45,interval=4"


@dataclass(frozen=True)
class Kernel:
    """A hand-written kernel, by what is known of its schedule.

    Attributes:
        bundles: for 2^20 scores.
        q, kv: tokens of a grid step; lengths are padded to multiples.
    """

    bundles: int
    q: int
    kv: int

    def cycles(self, heads: int, length: int) -> float:
        """Of one call with as many queries as keys, on one chip."""
        padded = math.ceil(length / self.q) * self.q * math.ceil(length / self.kv)
        return self.bundles * heads * padded * self.kv / 2**20


@dataclass(frozen=True)
class Row:
    """A published measurement and how the port's choices are imitated.

    Attributes:
        name: of the kept document.
        title: for people.
        published: seconds per step.
        args: of ``tpuport plan``.
        kernel: put in place of our own kernel, which takes and gives the same layouts.
    """

    name: str
    title: str
    published: float
    args: tuple[str, ...]
    kernel: Kernel | None = None


ROWS = (
    Row(
        "cogvideox-exp2",
        "CogVideoX1.5-5B, dp=2,tp=4, exp2 kernel 3328/2816/256",
        2.08,
        (
            *("--model", "cogvideox", "--variant", "1.5-5b", "--mesh", "dp=2,tp=4"),
            *("--size", "1280x720"),
        ),
        Kernel(2066, 3328, 2816),
    ),
    Row(
        "hunyuanvideo-jax",
        "HunyuanVideo-1.5, tp=8, jax splash 2048/2048/1024",
        8.12,
        (*LARGE, "--attention", JAX),
    ),
    Row(
        "hunyuanvideo-replicated",
        "the same, attention projection and fc2 whole",
        7.29,
        (*LARGE, "--attention", JAX, "--sharding", "replicated-out"),
    ),
    Row(
        "hunyuanvideo-exp2",
        "the same, exp2 kernel 3072/2048/1024",
        5.81,
        LARGE,
        Kernel(2493, 3072, 2048),
    ),
    Row(
        "hunyuanvideo-deepcache",
        "DeepCache, every 4th of steps 11-45 full, jax splash, both whole",
        4.07,
        (
            *(*LARGE, "--attention", JAX, "--sharding", "replicated-out"),
            *("--cache", CACHED),
        ),
    ),
)


@dataclass(frozen=True)
class Decode:
    """A published decode, beside ours of the same size.

    Attributes:
        name: of the kept document.
        title: for people.
        published: seconds.
        compiled: published seconds of the compile, where there are some.
        args: of ``tpuport plan``.
    """

    name: str
    title: str
    published: float
    compiled: float | None
    args: tuple[str, ...]


DECODES = (
    Decode("decode-720", "720x1280, TorchAx", 0.86, 80, ("--size", "1280x720")),
    Decode("decode-768", "768x1360, TorchAx", 0.65, None, ("--size", "1360x768")),
    Decode(
        "decode-768-flax",
        "768x1360, Flax",
        1.30,
        None,
        ("--size", "1360x768", "--vae", "flax"),
    ),
)
#: Seconds of the first call of a step of CogVideoX1.5-5B, compile and all.
FIRST_CALL = 130


def document(row: Row | Decode, folder: Path) -> dict[str, Any]:
    """The kept plan of a row, made where there is none."""
    path = folder / f"{row.name}.json"
    if not path.is_file():
        command = [sys.executable, "-m", "tpuport", "plan", "--topology", "v6e-8"]
        environment = dict(os.environ)
        if isinstance(row, Decode):
            command += ["--model", "cogvideox", "--variant", "1.5-5b", *row.args]
            command += ["--stage", "decode", "--vae-tiling", "off"]
        else:
            # The ports run upstream's blocks, and so does what imitates them.
            command += [*row.args, "--blocks", "upstream", "--stage", "denoise"]
            # Nor did they set the flags that tpuport sets.
            environment["LIBTPU_INIT_ARGS"] = PLAIN_FLAGS
        done = subprocess.run(
            [*command, "--json"],
            env=environment,
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        path.write_text(done.stdout)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def predicted(row: Row, plan: dict[str, Any]) -> tuple[float, float]:
    """Seconds per step, and their floor, with the port's kernel in place of ours."""
    step, floor = plan["seconds_per_step"], plan["floor_per_step"]
    if row.kernel is None:
        return step, floor
    (program,) = plan["stages"]["denoise"]["programs"]
    call = max(program["attention"], key=lambda r: math.prod(r["query"]))
    batch, heads, length, _ = call["query"]
    parts = [plan["mesh"][axis] if axis else 1 for axis in call["split"][:2]]
    ours = max(kernel["cycles"] for kernel in plan["kernels"])
    theirs = row.kernel.cycles(batch * heads // math.prod(parts), length)
    layers = {"cogvideox": 42, "hunyuanvideo": 54}[plan["model"]]
    change = layers * (theirs - ours) / plan["chip"]["clock_hz"]
    return step + change, floor + change


def main(folder: Path) -> None:
    """Print the tables."""
    folder.mkdir(parents=True, exist_ok=True)
    print("| run | published | predicted | | floor |")
    print("| --- | --- | --- | --- | --- |")
    for row in ROWS:
        step, floor = predicted(row, document(row, folder))
        print(
            f"| {row.title} | {row.published:.2f} s | {step:.2f} s | "
            f"{step / row.published - 1:+.0%} | {floor:.2f} s |"
        )
    print("\n| decode, 81 frames | published | ours, predicted | | compile | ours |")
    print("| --- | --- | --- | --- | --- | --- |")
    for decode in DECODES:
        plan = document(decode, folder)
        seconds, compiled = plan["stage_seconds"]["decode"], plan["compile_seconds"]
        theirs = "" if decode.compiled is None else f"{decode.compiled:.0f} s"
        print(
            f"| {decode.title} | {decode.published:.2f} s | {seconds:.2f} s | "
            f"{seconds / decode.published - 1:+.0%} | {theirs} | {compiled:.0f} s |"
        )
    first = document(ROWS[0], folder)["compile_seconds"]
    print(
        f"\nThe first call of a step of CogVideoX1.5-5B took {FIRST_CALL} s with its "
        f"compile; this machine's compile of the row above took {first:.0f} s."
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "plans"))
