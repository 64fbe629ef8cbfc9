"""Where the records of two runs differ, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpuport.core.files.sealed_json import canonical, show


def differences(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Every difference of two nested mappings; names are dotted.

    Prompts come first, since a message names but some.
    """
    here, there = _flat(recorded), _flat(asked)
    keys = sorted(here.keys() | there.keys(), key=lambda k: ("prompt" not in k, k))
    return [
        f"{key} is {_told(here, there, key)}, asked {_told(there, here, key)}"
        for key in keys
        if key not in here
        or key not in there
        or canonical(here[key]) != canonical(there[key])
    ]


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _told(here: Mapping[str, Any], there: Mapping[str, Any], key: str) -> str:
    """One side of a difference; a long value is cut to where it starts to differ."""
    if key not in here:
        return "not set"
    text, other = show(here[key]), show(there.get(key))
    if len(text) <= 60:
        return text
    pairs = enumerate(zip(text, other, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))
    start = max(0, same - 20)
    end = start + 60
    return ("…" if start else "") + text[start:end] + ("…" if end < len(text) else "")
