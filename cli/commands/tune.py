"""``tpuport bench attention`` and ``tpuport tune``: kernels by the TPU compiler."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tpuport.cli.asked.environment import cache_folder, prepare
from tpuport.cli.asked.options import command, flag, given_flags
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import give_out, say
from tpuport.cli.shown.tables import columns
from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.chips import chip as chip_named
from tpuport.core.reports import plural
from tpuport.core.run.progress import Display
from tpuport.core.spec.run_settings import read_value
from tpuport.errors import TpuportError, UsageError

if TYPE_CHECKING:
    from tpuport.core.cost.attention_case import AttentionCase
    from tpuport.core.cost.attention_cycles import AttentionCost
    from tpuport.core.cost.tile_search import Tried, Tuning
    from tpuport.core.reports import Reporter


_UNITS = ("MXU", "VALU", "EUP", "XLU", "VLOAD", "VSTORE")

#: The options that say what a kernel is for.
_ABOUT = {
    "chip": flag("--chip", "v4, v5e, v5p, v6e or v7x; no chip is needed."),
    "head_dim": flag("--head-dim", "Width of a head.", min=1),
    "q_len": flag("--q-len", "Number of queries.", min=1),
    "kv_len": flag("--kv-len", "Number of keys. (default: as queries)", min=1),
    "heads": flag("--heads", "Heads of one chip.", min=1),
}


@command(
    "bench attention",
    **_ABOUT,
    tiles=flag(
        "--blocks auto|Q/KV/COMPUTE",
        "Tokens of a tile, for all kernels; auto lets each kernel choose.",
    ),
    kernel=flag("--kernel", "tpuport or jax; may be repeated. (default: both)"),
)
def bench_attention(
    settings: Settings,
    chip: str = "v6e",
    head_dim: int = 64,
    q_len: int = 39826,
    kv_len: int | None = None,
    heads: int = 12,
    tiles: str = "auto",
    kernel: list[str] | None = None,
) -> None:
    """Compare attention kernels by the TPU compiler's schedule.

    Needs no TPU: each kernel is compiled for the chip, and its bundles are counted. A
    bundle takes one cycle. The table shows cycles of a grid step for 2^20 scores.
    "whole call" adds the padding of the lengths, and how often each part runs.

    Example: tpuport bench attention --chip v6e --q-len 17776
    """
    prepare(debug=settings.debug)
    folder = cache_folder(settings.cache_dir) / "kernels"
    from tpuport.core.cost.attention_case import AttentionCase, Blocks

    blocks = None if tiles == "auto" else Blocks.parse(tiles)
    about = _about(chip, head_dim, q_len, kv_len, heads)
    cases = [
        AttentionCase(implementation=name, blocks=blocks, **about)
        for name in dict.fromkeys(kernel or ("tpuport", "jax"))
    ]
    with Display(signals.check) as display:
        rows, failed = _compared(cases, folder, display)
    if not rows:
        raise failed[0]
    give_out(rows, as_json=settings.json, text=_kernels_text(rows))
    if failed:
        raise typer.Exit(1)


def _about(
    chip: str, head_dim: int, q_len: int, kv_len: int | None, heads: int
) -> dict[str, Any]:
    read_value(chip_named, chip, "--chip")
    lengths = {"q_len": q_len, "kv_len": kv_len or q_len}
    return {"chip": chip, "head_dim": head_dim, "heads": heads, **lengths}


def _compared(
    cases: Sequence[AttentionCase], folder: Path, reporter: Reporter
) -> tuple[list[dict[str, Any]], list[TpuportError]]:
    from tpuport.core.cost.attention_cycles import attention_cost
    from tpuport.core.mesh.slices import TopologyError

    rows: list[dict[str, Any]] = []
    failed: list[TpuportError] = []
    for case in cases:
        name = case.implementation
        if name == "tpuport" and case.blocks is None:
            _say_if_stale(case, reporter)
        try:
            with reporter.timed(f"compiling {name} for {case.chip}"):
                rows.append(row(attention_cost(case, cache=folder)))
        except TopologyError:
            raise  # without the compiler none of them has figures
        except TpuportError as error:
            if len(cases) == 1:
                raise
            reporter.say(f"{name} is left out: {one_line(error)}")
            failed.append(error)
        else:
            bundles = rows[-1]["bundles_per_2_20_scores"]
            reporter.say(f"{name}: {bundles:.0f} bundles for 2^20 scores")
    return rows, failed


def _say_if_stale(case: AttentionCase, reporter: Reporter) -> None:
    from tpuport.core.cost.tile_search import is_stale
    from tpuport.kernels.attention.block_table import find_entry

    entry = find_entry(case.chip, case.head_dim, case.q_len, case.kv_len)
    if entry is not None and is_stale(entry):
        reporter.say(
            "the tiles in the table were found for another form of the kernel; "
            "`tpuport tune --again --write` looks anew"
        )


#: Figures that a row has as they are: of the call, and of its cost.
_CASE = ("implementation", "chip", "head_dim", "q_len", "kv_len", "heads")
_COST = (
    *("cores", "utilization", "busiest", "spills", "fills", "other_cycles"),
    *("compile_seconds", "versions"),
)


def row(cost: AttentionCost) -> dict[str, Any]:
    """One kernel's figures, JSON-ready."""
    return {
        **{name: getattr(cost.case, name) for name in _CASE},
        "blocks": str(cost.blocks),
        "bundles_per_2_20_scores": cost.bundles_per_tile,
        "whole_call_cycles_per_2_20_scores": cost.cycles_per_tile,
        "whole_call_cycles": cost.cycles,
        "grid": list(cost.grid),
        "bundles_per_grid_step": cost.step_bundles,
        **{name: getattr(cost, name) for name in _COST},
    }


def _kernels_text(rows: list[dict[str, Any]]) -> list[str]:
    first = rows[0]
    table = [
        ["kernel", "blocks", "bundles", "whole call", *_UNITS, "spills", "fills"],
        *(
            [
                r["implementation"],
                r["blocks"],
                f"{r['bundles_per_2_20_scores']:.0f}",
                f"{r['whole_call_cycles_per_2_20_scores']:.0f}",
                *(f"{r['utilization'][unit]:.0%}" for unit in _UNITS),
                f"{r['spills']:.0f}",
                f"{r['fills']:.0f}",
            ]
            for r in rows
        ),
    ]
    return [
        f"{first['chip']}, head dim {first['head_dim']}, {first['q_len']} x "
        f"{first['kv_len']}, {first['heads']} heads",
        "",
        *columns(table),
        "",
        "bundles: cycles for 2^20 scores, all that the grid steps run",
        "whole call: cycles for 2^20 scores asked for, with the padding of the lengths",
        "MXU ...: share of the unit's slots that is used",
    ]


@command(
    "tune",
    **_ABOUT,
    limit=flag("--limit", "The most candidates to compile.", min=1),
    write=flag("--write", "Write the best tiles into the table."),
    again=flag("--again", "Search again for every entry of the table."),
    table=flag("--table FILE", "A table of tiles. (default: the kernel's own)"),
)
def tune(
    settings: Settings,
    context: typer.Context,
    chip: str = "v6e",
    head_dim: int = 64,
    q_len: int = 39826,
    kv_len: int | None = None,
    heads: int = 12,
    limit: int = 24,
    write: bool = False,
    again: bool = False,
    table: str | None = None,
) -> None:
    """Find the attention tiles that take the fewest cycles.

    Needs no TPU. Each candidate takes up to a minute to compile; the cache folder keeps
    what was compiled.

    Example: tpuport tune --chip v5e --q-len 17776 --limit 8
    """
    prepare(debug=settings.debug)
    folder = cache_folder(settings.cache_dir) / "kernels"
    from tpuport.core.cost.attention_case import AttentionCase
    from tpuport.core.cost.tile_search import case_of, write_entry
    from tpuport.kernels.attention.block_table import TABLE, read_entries

    target = Path(table).expanduser() if table else TABLE
    searches: list[tuple[AttentionCase, int]]
    if again:
        for said in given_flags(context, (*_ABOUT, "limit")):
            raise UsageError(f"{said} would not be used with --again")
        try:
            rows = read_entries(target)
        except ValueError as error:
            raise UsageError(str(error)) from error
        searches = [(case_of(row), row.get("limit", limit)) for row in rows]
    else:
        about = _about(chip, head_dim, q_len, kv_len, heads)
        searches = [(AttentionCase(implementation="tpuport", **about), limit)]
    entries = []
    for case, most in searches:
        with Display(signals.check) as display:
            found, entry = _search(case, most, folder, display)
        entries.append(entry)
        if write:
            write_entry(target, entry)
            say(f"wrote {target}")
        if not settings.json:  # a search may take hours: each is told at its end
            print("\n".join(_text(found)))
    if settings.json:
        give_out(entries if again else entries[0], as_json=True)


def _search(
    case: AttentionCase, limit: int, folder: Path, reporter: Reporter
) -> tuple[Tuning, dict[str, Any]]:
    from tpuport.core.cost.attention_case import fits, rule_blocks
    from tpuport.core.cost.attention_cycles import attention_cost
    from tpuport.core.cost.tile_search import table_entry, tune

    def measure(candidate: AttentionCase) -> AttentionCost:
        with reporter.timed(f"compiling {candidate.blocks}"):
            return attention_cost(candidate, cache=folder)

    reporter.say(f"{case.chip}, head dim {case.head_dim}, {case.q_len} x {case.kv_len}")
    found = tune(
        case,
        start=rule_blocks(case),
        fits=lambda blocks: fits(case, blocks),
        limit=limit,
        measure=measure,
        on_tried=_teller(limit, reporter.say),
    )
    return found, table_entry(found, _command(case, limit), limit)


def _command(case: AttentionCase, limit: int) -> str:
    return shlex.join(
        [
            *("tpuport", "tune", "--chip", case.chip),
            *("--head-dim", str(case.head_dim), "--q-len", str(case.q_len)),
            *("--kv-len", str(case.kv_len), "--heads", str(case.heads)),
            *("--limit", str(limit), "--write"),
        ]
    )


def _teller(limit: int, say: Callable[[str], None] = say) -> Callable[[Tried], None]:
    """Says what was tried, and how long the rest of at most ``limit`` may take."""
    started, count = time.monotonic(), 0

    def tell(tried: Tried) -> None:
        nonlocal count
        count += 1
        found = tried.refused
        if tried.cycles is not None:
            found = f"{tried.cycles:,.0f} cycles"
        each = (time.monotonic() - started) / count
        left = max(limit - count, 0) * each / 60
        say(
            f"candidate {count} of at most {limit}, at most about {left:.0f} min left: "
            f"{tried.blocks}: {found}"
        )

    return tell


def _text(found: Tuning) -> list[str]:
    best = found.best
    rows: list[list[Any]] = [["blocks", "cycles", "bundles for 2^20 scores"]]
    known = [t for t in found.tried if t.cycles is not None]
    for t in sorted(known, key=lambda t: t.cycles or 0.0):
        rows.append([str(t.blocks), f"{t.cycles:,.0f}", f"{t.bundles_per_tile:.0f}"])
    end = "the search is at its end" if found.exhausted else "stopped at the limit"
    return [
        *columns(rows),
        "",
        f"best: {best.blocks}, of {plural(len(found.tried), 'candidate')}; {end}",
    ]
