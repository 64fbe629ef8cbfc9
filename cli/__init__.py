"""The command line: `tpuport ...`.

Here itself only the app that lists the commands.
Order of the rooms, lowest first: shown, asked, runs, commands.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tpuport`` with ``argv`` (by default the process's own); the exit code."""
    from tpuport.cli.app import run

    code = run(argv)
    if argv is None:
        # Looking for garbage in what the libraries hold would take a second.
        gc.freeze()
    return code


__all__ = ["main"]
