"""Commands whose parser says which of them an error is of.

The parser leaves that out of the error for an option without its value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand, TyperGroup


@contextlib.contextmanager
def _name_command(context: Any) -> Iterator[None]:
    """Put the command into an error that leaves the block without one."""
    try:
        yield
    except Exception as error:
        if getattr(error, "ctx", context) is None:
            error.ctx = context  # type: ignore[attr-defined]
        raise


class Command(TyperCommand):
    """A command that does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's own."""
        with _name_command(ctx):
            return super().parse_args(ctx, args)


class Group(TyperGroup):
    """The same of a command with others in it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's own."""
        with _name_command(ctx):
            return super().parse_args(ctx, args)
