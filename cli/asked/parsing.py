"""Commands as typer makes them, with a short help and errors that name the command."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup

from tpuport.core.spec.run_settings import EVERY, PANELS

#: Columns of a help text that flags may take.
_FLAGS = 30


@contextlib.contextmanager
def _name_command(context: Any) -> Iterator[None]:
    """Put the command into an error that leaves the block without one.

    The parser leaves that out of the error for an option without its value.
    """
    try:
        yield
    except Exception as error:
        if getattr(error, "ctx", context) is None:
            error.ctx = context  # type: ignore[attr-defined]
        raise


def _write_options(command: Any, context: Any, formatter: Any) -> None:
    """A section for each panel; the common flags have none and come first."""
    sections: dict[str, list[tuple[str, str]]] = {
        panel or "Options": [] for panel in ("Arguments", *PANELS)
    }
    for parameter in command.get_params(context):
        if parameter.hidden:
            continue
        name, text = parameter.get_help_record(context)
        if parameter.param_type_name == "argument":
            sections["Arguments"].append((parameter.metavar or parameter.name, text))
            continue
        short = [flag for flag in parameter.opts if not flag.startswith("--")]
        words = [*short, *[f for f in parameter.opts if f not in short][:1]]
        if not parameter.is_flag:
            kind = "N" if "int" in name else "X" if "float" in name else "TEXT"
            words.append(parameter.metavar or kind)
        panel = EVERY if parameter.name == "help" else parameter.rich_help_panel
        sections[panel or "Options"].append((" ".join(words), text))
    for title, rows in sections.items():
        if rows:
            with formatter.section(title):
                formatter.write_dl(rows, col_max=_FLAGS)


class _Told:
    """Errors that name the command, and options panel by panel."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's own."""
        with _name_command(ctx):
            found: list[str] = super().parse_args(ctx, args)  # type: ignore[misc]
            return found

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Panel by panel; of a group the commands too."""
        _write_options(self, ctx, formatter)
        if isinstance(self, TyperGroup):
            self.format_commands(ctx, formatter)


class Command(_Told, TyperCommand):
    """A command."""


class Group(_Told, TyperGroup):
    """A command with others in it."""
