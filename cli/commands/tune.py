"""``tpuport tune``: search the splash kernel's tiles with the TPU compiler."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.commands.bench_attention import Chip, HeadDim, Heads, KvLen, QLen
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import print_json, say
from tpuport.cli.shown.tables import columns
from tpuport.core.reports import plural
from tpuport.core.run.progress import Display
from tpuport.errors import UsageError

if TYPE_CHECKING:
    from tpuport.core.cost.attention_case import AttentionCase
    from tpuport.core.cost.attention_cycles import AttentionCost
    from tpuport.core.cost.tile_search import Tried, Tuning
    from tpuport.core.reports import Reporter


@command("tune")
def tune(
    settings: Settings,
    context: typer.Context,
    chip: Chip = "v6e",
    head_dim: HeadDim = 64,
    q_len: QLen = 39826,
    kv_len: KvLen = None,
    heads: Heads = 12,
    limit: Annotated[
        int, typer.Option("--limit", min=1, help="The most candidates to compile.")
    ] = 24,
    write: Annotated[
        bool,
        typer.Option("--write", help="Write the best tiles into the table."),
    ] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Search again for every entry of the table."),
    ] = False,
    table: Annotated[
        str | None,
        typer.Option(
            "--table",
            metavar="FILE",
            help="A table of tiles. (default: the kernel's own)",
        ),
    ] = None,
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
        _alone(context)
        try:
            rows = read_entries(target)
        except ValueError as error:
            raise UsageError(str(error)) from error
        searches = [(case_of(row), row.get("limit", limit)) for row in rows]
    else:
        case = AttentionCase(
            implementation="tpuport",
            chip=chip,
            heads=heads,
            q_len=q_len,
            kv_len=kv_len or q_len,
            head_dim=head_dim,
        )
        searches = [(case, limit)]
    entries = []
    for case, most in searches:
        with Display(signals.check) as display:
            found, entry = _search(case, most, folder, display)
        entries.append(entry)
        if write:
            write_entry(target, entry)
            say(f"wrote {target}")
        if not settings.json:
            print("\n".join(_text(found)))
    if settings.json:
        print_json(entries if again else entries[0])


def _alone(context: typer.Context) -> None:
    """Refuse options of one search beside those that the table has."""
    for name in ("chip", "head_dim", "q_len", "kv_len", "heads", "limit"):
        source = getattr(context.get_parameter_source(name), "name", "")
        if source == "COMMANDLINE":
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} would not be used with --again")


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
