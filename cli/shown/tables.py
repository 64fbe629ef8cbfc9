"""Rows as plain text: aligned, without colours, whole whatever the terminal's width."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: Wider than any row: a table is as wide as its cells, and no name is cut.
_WIDTH = 100_000


def columns(
    rows: Sequence[Sequence[str]], *, indent: str = "", right: Collection[int] = ()
) -> list[str]:
    """One line for each row, in columns that are two blanks apart.

    Args:
        rows: all of them with as many cells.
        indent: what every line begins with.
        right: the columns whose cells are set to the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not rows:
        return []
    grid = Table.grid(padding=(0, 2, 0, 0))
    for index in range(len(rows[0])):
        grid.add_column(justify="right" if index in right else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*map(Text, row))
    console = Console(width=_WIDTH, color_system=None)
    with console.capture() as made:
        console.print(grid)
    return [f"{indent}{line}".rstrip() for line in made.get().splitlines()]
