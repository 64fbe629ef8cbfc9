"""How a command fails: one line, an exit code, and what to do next."""

from __future__ import annotations

import contextlib
import difflib
import os
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass

import typer

from tpuport.errors import LINE, TpuportError, in_one_line, quoted

INTERRUPTED = 130
"""What a shell reports for a program ended by Ctrl-C."""


@dataclass
class Guard:
    """What :func:`reported` does with an error; ``debug`` may be set on the way."""

    debug: bool = False


@contextlib.contextmanager
def reported(*, debug: bool = False) -> Iterator[Guard]:
    """Turn whatever the block raises into a line on stderr and an exit code.

    Notes on the exception (:meth:`BaseException.add_note`) follow the line: they say
    how to go on.

    Raises:
        typer.Exit: with the code, after the line is out.
    """
    guard = Guard(debug)
    try:
        yield guard
    except (typer.Exit, typer.Abort):
        raise
    except BrokenPipeError:
        # Whoever read stdout has seen enough (`| head`). What is left in the buffer
        # must go somewhere, or Python complains when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except (Exception, KeyboardInterrupt) as error:
        raise typer.Exit(explain(error, debug=guard.debug)) from None


def explain(error: BaseException, *, debug: bool) -> int:
    """Print an error for people; returns the exit code."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, KeyboardInterrupt):
        code, text = INTERRUPTED, "interrupted"
    elif isinstance(error, TpuportError):
        code, text = error.exit_code, f"error: {error}"
    else:
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        code, text = 1, f"error: unexpected {what}"
        if not debug:
            text += "; run again with --debug"
    print(in_one_line(text), file=sys.stderr)
    if not debug:  # a traceback has the notes already
        for note in getattr(error, "__notes__", ()):
            if not _from_jax(note):
                print(note, file=sys.stderr)
    return code


def _from_jax(note: str) -> bool:
    """Whether a note is jax's remark on tracebacks, which the user does not see."""
    return "JAX has removed" in note or not note.strip("-")


def as_usage_error(error: Exception) -> str | None:
    """The line for an error of typer's parser, or ``None`` for any other error.

    Which click typer uses, its own or the package, depends on its version, so the
    parser's errors are told by what they can do.
    """
    if not hasattr(error, "format_message"):
        return None
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "tpuport"
    message = " ".join(error.format_message().split()).rstrip(".")
    # An option that lacks its value has a name too, and a message that says so.
    if hasattr(error, "possibilities") and (name := getattr(error, "option_name", "")):
        known = error.possibilities or ()
        near = difflib.get_close_matches(name, known, 1, 0.75)
        message = f"No such option: {quoted(name)[1:-1]}"
        if near:
            message += f" (did you mean {near[0]}?)"
    value = _refused_value(error)
    if value is not None and repr(value) not in message:
        message += f", got {quoted(value)}"
    return in_one_line(f"{message}; see `{command} --help`", LINE - len("error: "))


def _refused_value(error: Exception) -> str | None:
    """What was given where the parser of a value refused it and does not repeat it."""
    entries = getattr(error.__cause__, "errors", None)
    if not callable(entries):
        return None
    given = entries()[0].get("input")
    return given if isinstance(given, str) else None
