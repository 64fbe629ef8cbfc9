"""The command line: `tpuport ...`.

Here itself only the app that lists the commands.
Order of the rooms, lowest first: shown, asked, runs, batches, commands.
To refuse is to raise a TpuportError, which `shown.errors` tells in one line. "Raises"
says which one only where a caller acts on it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tpuport`` with ``argv``; the exit code.

    Without ``argv`` this is the program itself, with the process's arguments, and
    signals end the process: see :mod:`tpuport.cli.shown.signals`.
    """
    if argv is None:
        return _as_program()
    from tpuport.cli.app import run

    return run(argv)


def _end(*_: object) -> None:
    """Ctrl-C while the module that minds signals is not imported yet."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _as_program() -> int:
    early = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if early:  # SIGINT is neither ignored nor minded by a caller
            signal.signal(signal.SIGINT, _end)
    except ValueError:  # not in the main thread
        early = False
    # Closed by whoever began the process: nobody reads what is said.
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    from tpuport.cli.shown.signals import as_program

    try:
        return as_program(_program)
    finally:
        if early:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _program() -> int:
    import gc

    from tpuport.cli.shown.signals import starting

    with starting():
        from tpuport.cli.app import run
    code = run(None)
    # Looking for garbage in what the libraries hold would take a second.
    gc.freeze()
    return code


__all__ = ["main"]
