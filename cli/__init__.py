"""The command line. Importing it is cheap: no torch, no jax, no numpy."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``tpuport`` with ``argv`` (by default the process's own); the exit code."""
    from ._app import run

    return run(argv)


__all__ = ["main"]
