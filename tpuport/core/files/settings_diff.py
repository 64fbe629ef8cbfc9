"""Whether two sets of settings are the same request, and where they differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tpuport.core.files.sealed_json import canonical, show


def differences(recorded: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
    """Every difference of two flat sets of settings, in words.

    The model comes first, then prompts: a message names but some.

    6 and 6.0 are one value; True and 1 are two.
    """
    keys = asked.keys() | recorded.keys()
    return [
        f"{key} is {_difference(recorded, asked, key)}, asked"
        f" {_difference(asked, recorded, key)}"
        for key in sorted(keys, key=_order)
        if (key in asked) != (key in recorded)
        or canonical(_plain_numbers(asked[key]))
        != canonical(_plain_numbers(recorded[key]))
    ]


def _order(key: str) -> tuple[bool, bool, str]:
    return key.startswith("settings."), "prompt" not in key, key


def _plain_numbers(value: Any) -> Any:
    """``value`` with 6.0 written as 6, so that the two compare equal."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain_numbers(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain_numbers(item) for key, item in value.items()}
    return value


def flatten(settings: Mapping[str, Any], prefix: str = "settings.") -> dict[str, Any]:
    """Nested settings as one level of dotted names."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _difference(here: Mapping[str, Any], there: Mapping[str, Any], key: str) -> str:
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
