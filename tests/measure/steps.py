"""How time and memory scale, and plans beside published steps of hand-written ports:
the tables of docs/performance.md.

``python -m tests.measure.steps TABLE FOLDER [WORD ...]`` (``flags``, ``slices``,
``published``, ``decodes``) runs ``tpuport plan`` once for each row that has no
``NAME.json`` in FOLDER yet (half a minute to some minutes each on two cores), keeps the
document there, and prints the table and, below it, the command of each row. With words
only rows whose command, or what they are called in the table, has all of them. What was
kept from another source of tpuport is told. Nothing here is measured on a chip, and no
published figure was measured by this project.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import tpuport


class Model(NamedTuple):
    """A model by its name in tables, its flags, and its blocks with attention."""

    title: str
    args: str
    layers: int


MODELS = {
    "cogvideox": Model(
        "CogVideoX1.5-5B",
        "--model cogvideox --variant 1.5-5b --size 1280x720 --frames 81",
        42,
    ),
    "hunyuanvideo": Model(
        "HunyuanVideo-1.5",
        "--model hunyuanvideo --variant 1.5-720p-t2v --size 1280x720 --frames 121",
        54,
    ),
}
# The compiler's own values of the flags that tpuport sets.
PLAIN_FLAGS = (
    "--xla_tpu_scoped_vmem_limit_kib=-1 --xla_tpu_enable_async_all_to_all=false"
)
UPSTREAM = "--blocks upstream"
DECODE = "--stage decode --vae-tiling off"
# Devices of a slice of eight cores of v5p.
DEVICES = {"v5p-8": 4}


class Published(NamedTuple):
    """A step of a hand-written port: seconds, and what is known of its kernel.

    ``bundles`` are for 2^20 scores; lengths are padded to multiples of ``q``, ``kv``.
    """

    seconds: float
    bundles: int
    q: int
    kv: int

    def cycles(self, heads: int, length: int) -> float:
        """Of one call with as many queries as keys, on one chip."""
        padded = math.ceil(length / self.q) * self.q * math.ceil(length / self.kv)
        return self.bundles * heads * padded * self.kv / 2**20


@dataclass(frozen=True)
class Row:
    """One plan: what it is called, where it runs, and what else the command says."""

    title: str
    model: str
    slice: str
    args: str
    environment: dict[str, str] = field(default_factory=dict)
    published: Published | None = None

    @property
    def command(self) -> str:
        args = f"{MODELS[self.model].args} {self.args}"
        text = f"tpuport plan --topology {self.slice} {args}"
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
            kept = {**json.loads(done.stdout), "source": source_hash()}
            path.write_text(json.dumps(kept, indent=1) + "\n")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def source_hash() -> str:
    """Of the source of tpuport."""
    files = sorted(Path(tpuport.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def tokens_over(devices: int) -> str:
    """Guidance over two parts, tokens over the others."""
    return f"--mesh dp=2,sp={devices // 2}" if devices > 1 else "--mesh dp=1"


def flags() -> list[Row]:
    """The compiler's flags one after the other, on four generations."""
    without_limit = PLAIN_FLAGS.split()[0]
    kinds = {"neither": PLAIN_FLAGS, "async all-to-all": without_limit, "both": ""}
    places = [("cogvideox", f"{chip}-8") for chip in ("v6e", "v7x", "v5p", "v5e")]
    places.insert(1, ("hunyuanvideo", "v6e-8"))
    return [
        Row(
            title,
            model,
            topology,
            tokens_over(DEVICES.get(topology, 8)),
            {"LIBTPU_INIT_ARGS": given} if given else {},
        )
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
            ("1 video", tokens_over(count)),
            (
                f"{count // 8} videos",
                f"--batch {count // 8} --mesh dp={count // 4},sp=4",
            ),
        )
        if title == "1 video" or count in (64, 256)
    ]


def published() -> list[Row]:
    """Mesh, tiles and blocks of hand-written ports, without the flags of tpuport."""
    plain = {"LIBTPU_INIT_ARGS": PLAIN_FLAGS}
    return [
        Row(
            "dp=2,tp=4, exp2 kernel 3328/2816/256",
            "cogvideox",
            "v6e-8",
            f"{UPSTREAM} --mesh dp=2,tp=4",
            plain,
            Published(2.08, 2066, 3328, 2816),
        ),
        Row(
            "tp=8, exp2 kernel 3072/2048/1024",
            "hunyuanvideo",
            "v6e-8",
            f"{UPSTREAM} --mesh tp=8",
            plain,
            Published(5.81, 2493, 3072, 2048),
        ),
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
    "flags": flags,
    "slices": slices,
    "published": published,
    "decodes": decodes,
}
STEP_HEAD = [
    *("model", "slice", "mesh", "what", "attention", "products", "rest"),
    *("collectives", "step", "memory per chip"),
]
PUBLISHED_HEAD = ["model", "what", "published", "predicted", "of it", "floor"]
DECODE_HEAD = ["model", "slice", "what", "programs", "decode", "memory per chip"]
DECODE_HEAD += ["compile"]


def memory(plan: dict[str, Any]) -> str:
    """Of a chip."""
    fits = "" if plan["fits"] else ", does not fit"
    return f"{plan['hbm_bytes_per_chip'] / 2**30:.1f} GiB{fits}"


def cells(row: Row, plan: dict[str, Any]) -> list[str]:
    """Slice and mesh, cycles of a layer by what they are spent on, seconds, memory."""
    model = MODELS[row.model]
    mesh = ",".join(f"{k}={v}" for k, v in plan["mesh"].items() if v > 1) or "dp=1"
    seconds, split = plan["seconds_per_step"], plan["split"]
    million = [
        f"{split[key] * plan['chip']['clock_hz'] / model.layers / 1e6:.2f}"
        if split
        else "-"
        for key in ("attention", "matmul", "other", "collective")
    ]
    step = f"{seconds:.3f} s" if seconds else "-"
    return [model.title, row.slice, mesh, row.title, *million, step, memory(plan)]


def published_cells(row: Row, plan: dict[str, Any]) -> list[str]:
    """A published step beside the plan with the port's kernel in place of ours."""
    kernel, model = row.published, MODELS[row.model]
    assert kernel is not None
    stage = plan["stages"]["denoise"]
    rows = [(p, one) for p in stage["programs"] for one in p["attention"]]
    program, call = max(rows, key=lambda found: math.prod(found[1]["query"]))
    batch, heads, length, _ = call["query"]
    parts = [plan["mesh"][axis] if axis else 1 for axis in call["split"][:2]]
    ours = max(one["cycles"] for one in plan["kernels"])
    theirs = kernel.cycles(batch * heads // math.prod(parts), length)
    calls = model.layers * program["calls"] / stage["calls"]
    change = calls * (theirs - ours) / plan["chip"]["clock_hz"]
    step = plan["seconds_per_step"] + change
    return [
        model.title,
        row.title,
        f"{kernel.seconds:.2f} s",
        f"{step:.2f} s",
        f"{step / kernel.seconds - 1:+.0%}",
        f"{plan['floor_per_step'] + change:.2f} s",
    ]


def decode_cells(row: Row, plan: dict[str, Any]) -> list[str]:
    """Seconds of the programs and of all, memory, and what compiling took."""
    programs = plan["stages"]["decode"]["programs"]
    return [
        MODELS[row.model].title,
        row.slice,
        row.title,
        " + ".join(f"{p['calls']} x {1000 * p['seconds']:.1f} ms" for p in programs),
        f"{plan['stage_seconds']['decode']:.3f} s",
        memory(plan),
        " + ".join(f"{p['compile_seconds']:.0f}" for p in programs) + " s",
    ]


HEADS = {
    "decodes": (DECODE_HEAD, decode_cells),
    "published": (PUBLISHED_HEAD, published_cells),
}


def main(table: str, folder: Path, words: list[str]) -> int:
    """Print one of the tables, and below it a command for each of its rows.

    Returns:
        how many rows have no plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    head, line = HEADS.get(table, (STEP_HEAD, cells))
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
        older += plan is not None and plan.get("source") != source_hash()
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
