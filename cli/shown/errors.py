"""How a command fails: one line, an exit code, and what to do next."""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import select
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from tpuport.cli.shown.signals import ended_by, in_words, leave
from tpuport.core.files.atomic import cannot_write, no_room
from tpuport.core.mesh.hosts import here
from tpuport.errors import (
    LINE,
    AtWorkError,
    MeshError,
    MissingStoreError,
    StoreError,
    TpuportError,
    in_one_line,
    quoted,
)

#: How jaxlib's errors begin where a device or its memory was at fault.
_OF_A_DEVICE = ("RESOURCE_EXHAUSTED", "UNAVAILABLE", "ABORTED", "DATA_LOSS")


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
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            # Whoever read stdout has seen enough (`| head`). What is left in the buffer
            # must go somewhere, or Python complains when it ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        raise typer.Exit(explain(error, debug=guard.debug)) from None


def _nobody_reads() -> bool:
    """Whether stdout is a pipe that its reader has closed; others may break too."""
    poll = select.poll()
    try:
        poll.register(sys.stdout, 0)
    except (OSError, TypeError):  # stdout is no file, or not there
        return False
    return bool(poll.poll(0))


def explain(error: BaseException, *, debug: bool) -> int:
    """Print an error for people; returns the exit code, but not after a signal."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    signum = ended_by(error)
    if signum is not None:
        code, text = in_words(signum)
    elif isinstance(error, TpuportError):
        # Below the command line nobody knows that a mesh is a flag's.
        flag = "--" * (isinstance(error, MeshError) and str(error).startswith("mesh "))
        code, text = error.exit_code, f"error: {flag}{error}"
    elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        name = quoted(str(error.filename))
        code, text = 2, f"error: {name} is too long for the name of a file or folder"
    elif no_room(error):
        place = getattr(error, "filename", None) or "a file of this command"
        code, text = 1, f"error: {cannot_write(Path(place), error)}"
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
    leave()
    if here().several:  # jax would wait for the others at the end, or abort
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def may_pass(error: BaseException) -> bool:
    """Whether the same run can succeed when it is tried again.

    A signal, a full disk, a lost device or store, memory that others have taken and a
    run directory that another process holds can pass: NFS frees the lock of a host that
    is gone after its lease. Any other error will come again. (The hub is
    asked before a run has a stage to keep.)
    """
    if ended_by(error) is not None or isinstance(error, MemoryError | AtWorkError):
        return True
    if isinstance(error, StoreError):
        return not isinstance(error, MissingStoreError)
    if no_room(error) or here().lost_by(error):
        return True
    # jaxlib has one class for all of its errors, torch one for its devices' memory.
    full = type(error).__name__ == "OutOfMemoryError"
    if full or str(error).startswith(_OF_A_DEVICE):
        return True
    return error.__cause__ is not None and may_pass(error.__cause__)


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
    if "extra argument" in message and "--prompt" in _options(context):
        message += ', give the prompt as --prompt "..."'
    if (refused := _refused_value(error)) is not None:
        message = f"{_flag(error)}: {refused}"
    return in_one_line(f"{message}; see `{command} --help`", LINE - len("error: "))


def _options(context: Any) -> list[str]:
    """The options of a command."""
    params = context.command.params if context is not None else ()
    return [name for param in params for name in param.opts]


#: What pydantic calls a fault of a value -> our words for the fault.
_FAULTS = {
    "int_parsing": "is not an integer; give one such as 8",
    "float_parsing": "is not a number; give one such as 2.5",
    "greater_than_equal": "is too small; give at least {ge}",
    "less_than_equal": "is too large; give at most {le}",
}


def _refused_value(error: Exception) -> str | None:
    """What was given, and what is wrong with it, where pydantic refused it."""
    entries = getattr(error.__cause__, "errors", None)
    if not callable(entries):
        return None
    first = entries()[0]
    words = _FAULTS.get(first["type"], first["msg"]).format(**first.get("ctx", {}))
    given = first["input"]
    return f"{quoted(given) if isinstance(given, str) else given} {words}"


def _flag(error: Exception) -> str:
    """The longest name of the option or argument that an error is about."""
    param: Any = getattr(error, "param", None)
    names = getattr(param, "opts", None) or ["a value"]
    return next((name for name in names if name.startswith("--")), str(names[0]))
