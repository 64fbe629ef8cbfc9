"""What goes to stdout (data) and to stderr (everything for people)."""

from __future__ import annotations

import json
import sys
from typing import Any


def say(text: str) -> None:
    """A line for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_json(document: Any) -> None:
    """The one JSON document of a command, on stdout."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def plural(count: int, unit: str) -> str:
    """``1 step``, ``2 batches``."""
    if count == 1:
        return f"1 {unit}"
    ending = "es" if unit.endswith(("ch", "sh", "s", "x")) else "s"
    return f"{count} {unit}{ending}"
