"""The search for the splash kernel's tiles, and the table it fills.

A candidate is compiled for the chip and costs the cycles of the whole call: the tiles'
own speed and the padding they need are both in it. Compiling all of them would take
hours, so the search goes along one axis at a time from the kernel's own choice, and
tiles that cannot fit VMEM are left out beforehand.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpuport.core.cost.attention_case import AttentionCase, Blocks, kernel_source_hash
from tpuport.core.cost.attention_cycles import AttentionCost
from tpuport.core.cost.kernel_cycles import KernelError
from tpuport.core.files.atomic import atomic_write_bytes, one_line
from tpuport.errors import UsageError
from tpuport.kernels.attention.block_table import bucket, read_entries
from tpuport.kernels.padding import ceil_div, round_up

#: The largest tile looked at, as large as the kernel's own rule takes.
LARGEST = 9984
#: Tokens that tiles of queries are multiples of, those that suit the kernel first.
STEPS = (256, 128)
COMPUTES = (128, 256, 384, 512, 1024)
#: Padding beyond that of the best tiles so far by more than this share of the scores is
#: not made up for by faster tiles.
MORE_PADDING = 0.05

Measure = Callable[[AttentionCase], AttentionCost]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """A candidate: its cycles in the whole call, or why it is none."""

    blocks: Blocks
    cycles: float | None = None
    bundles_per_tile: float | None = None
    refused: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, without what does not apply."""
        found = {
            "blocks": str(self.blocks),
            "cycles": self.cycles,
            "bundles_per_2_20_scores": self.bundles_per_tile
            and round(self.bundles_per_tile, 1),
            "refused": self.refused,
        }
        return {key: value for key, value in found.items() if value is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What a search found.

    Attributes:
        best: the cost of the best tiles.
        start: the tiles the search began at.
        tried: every candidate looked at, in that order.
        exhausted: whether the search ended by itself and not at its limit.
    """

    best: AttentionCost
    start: Blocks
    tried: tuple[Tried, ...]
    exhausted: bool


def tune(
    case: AttentionCase,
    *,
    start: Blocks,
    fits: Callable[[Blocks], bool],
    limit: int,
    measure: Measure,
    on_tried: Callable[[Tried], None] = lambda tried: None,
) -> Tuning:
    """Search the tiles with the fewest cycles for a call.

    From ``start`` the keys at a time, the keys held in VMEM and the queries are varied
    in turn, each over the sizes that cut the length evenly into about as many tiles,
    until a round brings nothing or ``limit`` candidates have been compiled. Tiles that
    pad much more than the best so far are left out.

    Args:
        case: the call; its blocks are not looked at.
        start: where to begin.
        fits: whether tiles are legal and fit VMEM; asked before a compile.
        limit: candidates to compile at most.
        measure: what costs a candidate.
        on_tried: called after each candidate.

    Raises:
        KernelError: no candidate compiles.
    """
    tried: dict[Blocks, Tried] = {}
    best: AttentionCost | None = None
    exhausted = True

    def attempt(blocks: Blocks) -> None:
        nonlocal best
        try:
            cost = measure(replace(case, blocks=blocks))
        except KernelError as error:
            if not error.refused:
                raise
            found = Tried(blocks=blocks, refused=one_line(error)[:200])
        else:
            each = cost.bundles_per_tile
            found = Tried(blocks=blocks, cycles=cost.cycles, bundles_per_tile=each)
            if best is not None and best.source_hash != cost.source_hash:
                raise KernelError(
                    "the kernel's source changed during the search; start again"
                )
            if best is None or cost.cycles < best.cycles:
                best = cost
        tried[blocks] = found
        on_tried(found)

    attempt(start)
    improved = True
    while improved and exhausted:
        before = best.cycles if best else None
        for axis in ("kv_compute", "kv", "q"):
            centre = best.blocks if best else start
            most = (1 + MORE_PADDING) * _padded(case, centre)
            for blocks in _along(axis, centre, case):
                if blocks in tried or _padded(case, blocks) > most or not fits(blocks):
                    continue
                if len(tried) >= limit:
                    exhausted = False
                    break
                attempt(blocks)
        improved = best is not None and (before is None or best.cycles < before)
    if best is None:
        reasons = "; ".join(str(t.refused) for t in tried.values())
        raise KernelError(f"no tiles tried can be compiled: {reasons}")
    return Tuning(
        best=best, start=start, tried=tuple(tried.values()), exhausted=exhausted
    )


def _along(axis: str, centre: Blocks, case: AttentionCase) -> Iterator[Blocks]:
    """Tiles that differ from ``centre`` in one size, those near it first."""
    if axis == "kv_compute":
        sizes = [size for size in COMPUTES if centre.kv % size == 0]
        sizes.sort(key=lambda size: abs(size - centre.kv_compute))
        yield from (replace(centre, kv_compute=size) for size in sizes)
    elif axis == "q":
        sizes = []
        most = (1 + MORE_PADDING) * case.q_len
        for step in STEPS:
            sizes += even_sizes(case.q_len, centre.q, step)
            if any(round_up(case.q_len, size) <= most for size in sizes):
                break  # finer steps are slower and could only pad little less
        yield from (replace(centre, q=size) for size in dict.fromkeys(sizes))
    else:
        for size in even_sizes(case.kv_len, centre.kv, centre.kv_compute):
            yield replace(centre, kv=size)


def even_sizes(length: int, near: int, step: int) -> list[int]:
    """Tile sizes that cut a length evenly, the counts next to that of ``near`` first.

    For each number of tiles the smallest multiple of ``step`` that covers the length:
    any larger one only pads more.
    """
    count = ceil_div(length, near)
    counts = [count + by for n in range(5) for by in (-n, n)]
    sizes = (round_up(ceil_div(length, tiles), step) for tiles in counts if tiles > 0)
    return list(dict.fromkeys(size for size in sizes if size <= LARGEST))


def _padded(case: AttentionCase, blocks: Blocks) -> int:
    """Scores of one head that these tiles compute."""
    return round_up(case.q_len, blocks.q) * round_up(case.kv_len, blocks.kv)


def table_entry(tuning: Tuning, command: str, limit: int) -> dict[str, Any]:
    """The row of the block table that a search gives.

    ``command`` makes it again; ``limit`` is that of the search.
    """
    cost = tuning.best
    case, blocks = cost.case, cost.blocks
    return {
        "chip": case.chip,
        "head_dim": case.head_dim,
        "q_len": list(bucket(case.q_len, blocks.q)),
        "kv_len": list(bucket(case.kv_len, blocks.kv)),
        "blocks": [blocks.q, blocks.kv, blocks.kv_compute],
        "bundles_per_2_20_scores": round(cost.bundles_per_tile, 1),
        "cycles_per_2_20_real_scores": round(cost.cycles_per_tile, 1),
        "measured": {
            "q_len": case.q_len,
            "kv_len": case.kv_len,
            "heads": case.heads,
            "dtype": case.dtype,
        },
        "command": command,
        "limit": limit,
        "started_at": str(tuning.start),
        "exhausted": tuning.exhausted,
        "tried": [t.as_dict() for t in tuning.tried],
        "versions": cost.versions,
        "source_hash": cost.source_hash,
    }


def case_of(entry: dict[str, Any]) -> AttentionCase:
    """The call that an entry of the table was found for."""
    return AttentionCase(
        implementation="tpuport",
        chip=entry["chip"],
        head_dim=entry["head_dim"],
        **entry["measured"],
    )


def is_stale(entry: dict[str, Any]) -> bool:
    """Whether an entry was found with another source of the kernel."""
    return bool(entry.get("source_hash") != kernel_source_hash())


def write_entry(table: Path, entry: dict[str, Any]) -> None:
    """Put an entry into a table, in place of what it has for the same call.

    Raises:
        UsageError: the file is there and is not a table of blocks.
        ArtifactError: it cannot be written.
    """
    try:
        entries = read_entries(table) if table.exists() else ()
    except ValueError as error:
        raise UsageError(str(error)) from error

    def call(row: dict[str, Any]) -> tuple[Any, ...]:
        measured = row["measured"]
        return row["chip"], row["head_dim"], measured["q_len"], measured["kv_len"]

    kept = [row for row in entries if call(row) != call(entry)]
    rows = sorted([*kept, entry], key=call)
    text = json.dumps({"format": 1, "entries": rows}, indent=1)
    atomic_write_bytes(table, text.encode() + b"\n")
    read_entries.cache_clear()
