"""How two program keys differ, in words: why a program was compiled again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_NAMES = {"host": "processor", "version": "key version"}

#: Arrays named one by one before the others are counted.
_NAMED = 3

#: A value longer than this is not printed.
_LONG = 100


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """The differences of two keys as dictionaries, what people set first."""

    def each(field: str, prefix: str = "") -> list[str]:
        return _each(before[field], after[field], prefix)

    def named(*names: str) -> list[str]:
        old, new = ({name: key[name] for name in names} for key in (before, after))
        return _each(old, new)

    shapes = _arrays(before, after, "arguments")
    if not shapes and before["structure"] != after["structure"]:
        shapes = ["what is traced changed"]
    return (
        *named("model", "component", "program"),
        *named("platform", "chip", "mesh"),
        *(named("devices") if before["mesh"] == after["mesh"] else ()),
        *named("host"),
        *each("config", f"{after['component']} "),
        *shapes,
        *_arrays(before, after, "weights"),
        *each("versions"),
        *named("compiler"),
        *_flags(before["flags"], after["flags"]),
        *each("settings"),
        *named("version"),
    )


def _pairs(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    return [
        (name, before.get(name), after.get(name))
        for name in dict.fromkeys((*after, *before))
        if before.get(name) != after.get(name)
    ]


def _each(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Every entry that differs; long configs are many small entries."""
    found = []
    for name, *values in _pairs(before, after):
        old, new = map(_text, values)
        how = f"{old} -> {new}" if len(old) + len(new) <= _LONG else "changed"
        found.append(f"{prefix}{_NAMES.get(name, name)} {how}")
    return found


def _text(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def _arrays(
    before: Mapping[str, Any], after: Mapping[str, Any], field: str
) -> list[str]:
    pairs = _pairs(before[field], after[field])
    # What changed its shape says more than what came or went with it.
    pairs.sort(key=lambda pair: pair[1] is None or pair[2] is None)
    # ``['inputs']['latents']`` becomes ``inputs.latents``.
    texts = [
        f"{path.lstrip('.')} {old or 'none'} -> {new or 'none'}"
        for name, old, new in pairs[:_NAMED]
        for path in [name.replace("']", "").replace("['", ".")]
    ]
    left = len(pairs) - len(texts)
    return [*texts, f"{left} more {field}"] if left else texts


def _flags(before: Any, after: Any) -> list[str]:
    gone = [f"{flag} is not set now" for flag in before if flag not in after]
    come = [f"{flag} is set now" for flag in after if flag not in before]
    return [f"compiler flag {text}" for text in (*gone, *come)]
