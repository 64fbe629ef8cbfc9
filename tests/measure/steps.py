"""What each change is worth, and how time and memory scale: the tables of
docs/performance.md and docs/log.

``python -m tests.measure.steps TABLE FOLDER [WORD ...]`` (``changes``, ``chips``,
``flags``, ``slices``, ``decodes``) runs ``tpuport plan`` once for each row that has no
``NAME.json`` in FOLDER yet (half a minute to some minutes each on two cores), keeps the
document there, and prints the table and, below it, the command of each row. With words
only rows whose command, or what they are called in the table, has all of them. What was
kept from another source of tpuport is told. Nothing here is measured on a chip.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tpuport.core.programs.program_key import source_hash

MODELS = {
    "cogvideox": ("--model cogvideox --variant 1.5-5b --size 1280x720", 42),
    "hunyuanvideo": (
        "--model hunyuanvideo --variant 1.5-720p-t2v --size 1280x720 --frames 121",
        54,
    ),
}
TITLES = {"cogvideox": "CogVideoX1.5-5B", "hunyuanvideo": "HunyuanVideo-1.5"}
# The compiler's own values of the flags that tpuport sets.
PLAIN_FLAGS = (
    "--xla_tpu_scoped_vmem_limit_kib=-1 --xla_tpu_enable_async_all_to_all=false"
)
DECODE = "--stage decode --vae-tiling off"
# Devices of a slice of eight, as its name counts them.
DEVICES = {"v6e-8": 8, "v5p-8": 4, "v7x-8": 8}


@dataclass(frozen=True)
class Row:
    """One plan: what it is called, where it runs, and what else the command says."""

    title: str
    model: str
    slice: str
    args: str
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        model, _ = MODELS[self.model]
        text = f"tpuport plan --topology {self.slice} {model} {self.args}"
        return " ".join([*(f'{k}="{v}"' for k, v in self.environment.items()), text])

    @property
    def name(self) -> str:
        parts = [self.model, self.slice, self.args, *self.environment]
        if PLAIN_FLAGS not in self.environment.values():
            parts += self.environment.values()
        return "".join(c if c.isalnum() else "-" for c in "-".join(parts))

    def document(self, folder: Path) -> dict[str, Any] | None:
        """The kept plan, made where there is none; ``None`` where that failed."""
        path = folder / f"{self.name}.json"
        if not path.is_file():
            args = shlex.split(self.command.partition("tpuport ")[2])
            done = subprocess.run(
                [sys.executable, "-m", "tpuport", *args, "--json"],
                env={**os.environ, **self.environment},
                stdout=subprocess.PIPE,
                check=False,
                text=True,
            )
            if done.returncode:
                print(f"{self.command}: exit code {done.returncode}", file=sys.stderr)
                return None
            made = json.loads(done.stdout)
            kept = {**made, "source": source_hash("tpuport")}
            path.write_text(json.dumps(kept, indent=1) + "\n")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def changes() -> list[Row]:
    """One change after the other, on eight chips or cores of three generations."""
    plain = {"LIBTPU_INIT_ARGS": PLAIN_FLAGS}
    upstream = "--blocks upstream"

    def steps(devices: int) -> list[tuple[str, str, bool]]:
        heads = f"--mesh dp=2,tp={devices // 2}"
        return [
            ("upstream's blocks, jax's kernel", f"{upstream} --attention jax", True),
            ("our kernel", upstream, True),
            ("one joint sequence, heads over tp", heads, True),
            ("tokens over sp", "", True),
            ("compiler flags: the default", "", False),
            ("weights of blocks in parts", "--sharding gathered", False),
        ]

    return [
        Row(title, model, topology, args, plain if without_flags else {})
        for topology, devices in DEVICES.items()
        for model in MODELS
        for title, args, without_flags in steps(devices)
    ]


def chips() -> list[Row]:
    """Upstream's blocks and native ones, on eight devices or cores of other chips."""
    return [
        Row(title, model, topology, args)
        for model in MODELS
        for topology in DEVICES
        for title, args in (("upstream's", "--blocks upstream"), ("native", ""))
        if topology != "v6e-8"
    ]


def flags() -> list[Row]:
    """The compiler's flags one after the other, on four generations."""
    without_limit = PLAIN_FLAGS.split()[0]
    kinds = {"neither": PLAIN_FLAGS, "async all-to-all": without_limit, "both": ""}
    places = [("cogvideox", f"{chip}-8") for chip in ("v6e", "v7x", "v5p", "v5e")]
    places.insert(1, ("hunyuanvideo", "v6e-8"))
    return [
        Row(title, model, topology, "", {"LIBTPU_INIT_ARGS": given} if given else {})
        for model, topology in places
        for title, given in kinds.items()
    ]


def slices() -> list[Row]:
    """One video on more and more chips, and a video for every eight of them."""
    return [
        Row(title, model, f"v6e-{count}", args)
        for model in MODELS
        for count in (1, 4, 8, 16, 32, 64, 128, 256)
        for title, args in (
            ("1 video", ""),
            (
                f"{count // 8} videos",
                f"--batch {count // 8} --mesh dp={count // 4},sp=4",
            ),
        )
        if not args or count in (64, 256)
    ]


def decodes() -> list[Row]:
    """The autoencoders, untiled, on one to eight chips."""
    return [
        *(
            Row(vae, "cogvideox", f"v6e-{count}", f"{DECODE} --vae {vae}")
            for count in (8, 4, 1)
            for vae in ("torchax", "flax")
        ),
        Row("torchax", "hunyuanvideo", "v6e-8", DECODE),
    ]


TABLES = {
    "changes": changes,
    "chips": chips,
    "flags": flags,
    "slices": slices,
    "decodes": decodes,
}

STEP_HEAD = [
    *("model", "slice", "mesh", "what", "attention", "products", "rest"),
    *("collectives", "step", "memory per chip"),
]
DECODE_HEAD = ["model", "slice", "what", "first chunk", "others", "decode"]
DECODE_HEAD += ["memory per chip", "compile"]


def cells(row: Row, plan: dict[str, Any]) -> list[str]:
    """Slice and mesh, cycles of a layer by what they are spent on, seconds, memory."""
    _, layers = MODELS[row.model]
    mesh = ",".join(f"{k}={v}" for k, v in plan["mesh"].items() if v > 1) or "dp=1"
    seconds = plan["seconds_per_step"]
    clock = plan["chip"]["clock_hz"]
    split = plan["split"] or {}
    million = [
        f"{split[key] * clock / layers / 1e6:.2f}" if split else "-"
        for key in ("attention", "matmul", "other", "collective")
    ]
    return [
        TITLES[row.model],
        row.slice,
        mesh,
        row.title,
        *million,
        f"{seconds:.3f} s" if seconds else "-",
        f"{plan['hbm_bytes_per_chip'] / 2**30:.1f} GiB"
        + ("" if plan["fits"] else ", does not fit"),
    ]


def decode_cells(row: Row, plan: dict[str, Any]) -> list[str]:
    """Seconds of a chunk and of all, memory, and what compiling took."""
    first, other = plan["stages"]["decode"]["programs"]
    return [
        TITLES[row.model],
        row.slice,
        row.title,
        f"{1000 * first['seconds']:.1f} ms",
        f"{other['calls']} x {1000 * other['seconds']:.1f} ms",
        f"{plan['stage_seconds']['decode']:.3f} s",
        f"{plan['hbm_bytes_per_chip'] / 2**30:.1f} GiB"
        + ("" if plan["fits"] else ", does not fit"),
        f"{first['compile_seconds']:.0f} + {other['compile_seconds']:.0f} s",
    ]


def main(table: str, folder: Path, words: list[str]) -> int:
    """Print one of the tables, and below it a command for each of its rows.

    Returns:
        how many rows have no plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    decoding = table == "decodes"
    head, line = (DECODE_HEAD, decode_cells) if decoding else (STEP_HEAD, cells)
    print("|", " | ".join(head), "|")
    print("|", " | ".join("---" for _ in head), "|")
    rows = [
        row
        for row in TABLES[table]()
        if all(word in row.command or word in row.title for word in words)
    ]
    if not rows:
        sys.exit(f"no row of {table} has all of: {' '.join(words)}")
    failed = older = 0
    for row in rows:
        plan = row.document(folder)
        failed += plan is None
        older += plan is not None and plan.get("source") != source_hash("tpuport")
        if plan is not None:
            print("|", " | ".join(line(row, plan)), "|", flush=True)
    if older:
        print(f"\n{older} of {len(rows)} rows were kept from another source of tpuport")
    print("\n```console", *(row.command for row in rows), "```", sep="\n")
    return failed


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in TABLES:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
