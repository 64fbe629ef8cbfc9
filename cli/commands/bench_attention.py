"""``tpuport bench attention``: what the compiler's schedule says of the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import print_json
from tpuport.cli.shown.tables import columns
from tpuport.core.files.atomic import one_line
from tpuport.core.run.progress import Display
from tpuport.errors import TpuportError

if TYPE_CHECKING:
    from tpuport.core.cost.attention_case import AttentionCase
    from tpuport.core.cost.attention_cycles import AttentionCost
    from tpuport.core.reports import Reporter

_UNITS = ("MXU", "VALU", "EUP", "XLU", "VLOAD", "VSTORE")

Chip = Annotated[
    str, typer.Option("--chip", help="v4, v5e, v5p, v6e or v7x; no chip is needed.")
]
HeadDim = Annotated[int, typer.Option("--head-dim", min=1, help="Width of a head.")]
QLen = Annotated[int, typer.Option("--q-len", min=1, help="Number of queries.")]
KvLen = Annotated[
    int | None,
    typer.Option("--kv-len", min=1, help="Number of keys. (default: as queries)"),
]
Heads = Annotated[int, typer.Option("--heads", min=1, help="Heads of one chip.")]


@command("bench attention")
def bench_attention(
    settings: Settings,
    chip: Chip = "v6e",
    head_dim: HeadDim = 64,
    q_len: QLen = 39826,
    kv_len: KvLen = None,
    heads: Heads = 12,
    tiles: Annotated[
        str,
        typer.Option(
            "--blocks",
            metavar="auto|Q/KV/COMPUTE",
            help="Tokens of a tile, for all kernels; auto lets each kernel choose.",
        ),
    ] = "auto",
    kernel: Annotated[
        list[str] | None,
        typer.Option(
            "--kernel",
            help="tpuport or jax; may be repeated. (default: both)",
        ),
    ] = None,
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
    cases = [
        AttentionCase(
            implementation=name,
            chip=chip,
            heads=heads,
            q_len=q_len,
            kv_len=kv_len or q_len,
            head_dim=head_dim,
            blocks=blocks,
        )
        for name in dict.fromkeys(kernel or ("tpuport", "jax"))
    ]
    with Display(signals.check) as display:
        rows, failed = _compared(cases, folder, display)
    if not rows:
        raise failed[0]
    if settings.json:
        print_json(rows)
    else:
        print("\n".join(_text(rows)))
    if failed:
        raise typer.Exit(1)


def _compared(
    cases: Sequence[AttentionCase], folder: Path, reporter: Reporter
) -> tuple[list[dict[str, Any]], list[TpuportError]]:
    """The rows of some kernels, and the errors of those that are left out."""
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


def _text(rows: list[dict[str, Any]]) -> list[str]:
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
