"""What goes to stdout (data) and to stderr (everything for people)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tpuport.core.files.atomic import atomic_write_json, cannot_write


def say(text: str) -> None:
    """A line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(document: Any) -> None:
    """The one JSON document of a command, on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def give_out(document: Any, *, as_json: bool, report: Path | None) -> None:
    """The one JSON document of a command: on stdout, in the file ``report``, or both.

    Raises:
        ArtifactError: the file cannot be written.
    """
    if report is not None:
        try:
            report.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise cannot_write(report, error) from error
        atomic_write_json(report, document)
        say(f"wrote {report}")
    if as_json:
        print_json(document)


def plural(count: int, unit: str) -> str:
    """``1 step``, ``2 batches``."""
    if count == 1:
        return f"1 {unit}"
    ending = "es" if unit.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{count} {unit}{ending}"
