"""Plans beside published steps of hand-written ports: docs/tpu-without-a-tpu.md.

``python -m tests.measure.published`` plans both ports on v6e-8 (720x1280, some minutes
each on two cores) with the port's mesh, the compiler's own flags and upstream's blocks,
puts the cycles of the port's kernel in place of ours, and prints a table. Nothing is
measured on a chip, and no published figure was measured by this project.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass

# The compiler's own values of the flags that tpuport sets.
PLAIN_FLAGS = (
    "--xla_tpu_scoped_vmem_limit_kib=-1 --xla_tpu_enable_async_all_to_all=false"
)


@dataclass(frozen=True, kw_only=True)
class Published:
    """A step of a hand-written port: seconds, and what is known of its kernel.

    ``bundles`` are for 2^20 scores; lengths are padded to multiples of ``q``, ``kv``.
    ``layers`` are the blocks with attention.
    """

    title: str
    args: str
    layers: int
    seconds: float
    bundles: int
    q: int
    kv: int

    @property
    def command(self) -> str:
        return f"tpuport plan --topology v6e-8 --blocks upstream {self.args}"

    def cycles(self, heads: int, length: int) -> float:
        """Of one call with as many queries as keys, on one chip."""
        padded = math.ceil(length / self.q) * self.q * math.ceil(length / self.kv)
        return self.bundles * heads * padded * self.kv / 2**20

    def row(self) -> str:
        """Published, predicted, the relation, and the floor of the prediction."""
        done = subprocess.run(
            [sys.executable, "-m", *shlex.split(self.command), "--json"],
            env={**os.environ, "LIBTPU_INIT_ARGS": PLAIN_FLAGS},
            stdout=subprocess.PIPE,
            check=True,
            text=True,
        )
        plan = json.loads(done.stdout)
        stage = plan["stages"]["denoise"]
        calls = [(p, one) for p in stage["programs"] for one in p["attention"]]
        program, call = max(calls, key=lambda found: math.prod(found[1]["query"]))
        batch, heads, length, _ = call["query"]
        parts = [plan["mesh"][axis] if axis else 1 for axis in call["split"][:2]]
        ours = max(one["cycles"] for one in plan["kernels"])
        theirs = self.cycles(batch * heads // math.prod(parts), length)
        times = self.layers * program["calls"] / stage["calls"]
        change = times * (theirs - ours) / plan["chip"]["clock_hz"]
        step = plan["seconds_per_step"] + change
        floor = plan["floor_per_step"] + change
        found = f"{step:.2f} s | {step / self.seconds - 1:+.0%} | {floor:.2f} s"
        return f"{self.title} | {self.seconds:.2f} s | {found}"


PORTS = (
    Published(
        title="CogVideoX1.5-5B: dp=2,tp=4, exp2 kernel 3328/2816/256",
        args="--model cogvideox --variant 1.5-5b --size 1280x720 --frames 81 "
        "--mesh dp=2,tp=4 --stage denoise",
        layers=42,
        seconds=2.08,
        bundles=2066,
        q=3328,
        kv=2816,
    ),
    Published(
        title="HunyuanVideo-1.5: tp=8, exp2 kernel 3072/2048/1024",
        args="--model hunyuanvideo --variant 1.5-720p-t2v --size 1280x720 --frames 121 "
        "--mesh tp=8 --stage denoise",
        layers=54,
        seconds=5.81,
        bundles=2493,
        q=3072,
        kv=2048,
    ),
)


def main() -> None:
    """Print the table, and the command of each row."""
    print("| | published | predicted | of it | floor |")
    print("| --- | --- | --- | --- | --- |")
    for port in PORTS:
        print(f"| {port.row()} |", flush=True)
    print("\n```console", *(port.command for port in PORTS), "```", sep="\n")


if __name__ == "__main__":
    main()
