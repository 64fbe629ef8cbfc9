"""The command line: `tpuport ...`.

Here itself only the app that lists the commands.
Order of the rooms, lowest first: shown, asked, runs, commands.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tpuport`` with ``argv``; the exit code.

    Without ``argv`` this is the program itself, with the process's arguments, and
    signals end the process: see :mod:`tpuport.cli.shown.signals`.
    """
    if argv is None:
        # Closed by whoever began the process: nobody reads what is said.
        sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
        from tpuport.cli.shown.signals import as_program

        return as_program(_program)
    from tpuport.cli.app import run

    return run(argv)


def _program() -> int:
    from tpuport.cli.shown.signals import starting

    with starting():
        from tpuport.cli.app import run
    code = run(None)
    # Looking for garbage in what the libraries hold would take a second.
    gc.freeze()
    return code


__all__ = ["main"]
