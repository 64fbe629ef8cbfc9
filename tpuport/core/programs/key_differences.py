"""How two program keys differ, in words: why a program was compiled again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_NAMES = {
    "num_frames": "frames",
    "num_inference_steps": "steps",
    "guidance_scale": "guidance",
    "batch_size": "batch",
    "matmul_precision": "matmul precision",
    "step_cache": "step cache",
}

#: Arrays named one by one before the others are counted.
_NAMED = 3

#: A value longer than this is not printed.
_LONG = 100


def differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """The differences of two keys as dictionaries, what people set first."""
    found: list[str] = []
    for name in ("model", "form", "stage", "program", "component"):
        found += _changed(name, before[name], after[name])
    found += _each(before, after, "options")
    shapes = _arrays(before, after, "arguments")
    if not shapes and before["structure"] != after["structure"]:
        shapes = ["the nesting of its arguments changed"]
    for name in ("platform", "chip"):
        found += _changed(name, before[name], after[name])
    found += [
        f"mesh {_mesh(b)} -> {_mesh(a)}"
        for b, a in [(before["mesh"], after["mesh"])]
        if b != a
    ]
    if before["mesh"] == after["mesh"] and before["devices"] != after["devices"]:
        found += _changed("devices", before["devices"], after["devices"])
    found += _changed("processor", before["host"], after["host"])
    found += _each(before, after, "config", f"{after['component']} ")
    found += shapes
    found += _arrays(before, after, "weights")
    found += [
        f"{name} source {'changed' if old and new else 'came' if new else 'went'}"
        for name, old, new in _pairs(before["source"], after["source"])
    ]
    found += _each(before, after, "versions")
    found += _changed("compiler", before["compiler"], after["compiler"])
    found += _flags(before["flags"], after["flags"])
    found += _each(before, after, "settings")
    found += _changed("key version", before["version"], after["version"])
    if not found:
        return ()
    # Only beside a difference that the program sees: more steps make no new program.
    seen = explained(before["context"], after["context"]) if shapes else []
    return (*seen, *found)


def spoken(name: str) -> str:
    """What people call a setting: ``frames`` for ``num_frames``."""
    return _NAMES.get(name, name)


def _pairs(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    names = [*after, *(name for name in before if name not in after)]
    return [
        (name, before.get(name), after.get(name))
        for name in names
        if before.get(name) != after.get(name)
    ]


def _each(
    before: Mapping[str, Any], after: Mapping[str, Any], field: str, prefix: str = ""
) -> list[str]:
    """Every entry of a field that differs; long configs are many small entries."""
    found = []
    for name, old, new in _pairs(before[field], after[field]):
        found += _changed(prefix + spoken(name), old, new)
    return found


def explained(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """How two requests differ, in what makes arrays of another shape.

    Steps make none. Guidance does where it comes or goes, as it doubles the rows.
    """
    left_out = {"num_inference_steps", "guided"}
    if before.get("guided") == after.get("guided"):
        left_out.add("guidance_scale")
    pairs = _pairs(before, after)
    return [
        text
        for name, old, new in pairs
        if name not in left_out
        for text in _changed(spoken(name), old, new)
    ]


def _changed(name: str, old: Any, new: Any) -> list[str]:
    if old == new:
        return []
    before, after = _text(old), _text(new)
    if len(before) + len(after) > _LONG:
        return [f"{name} changed"]
    return [f"{name} {before} -> {after}"]


def _text(value: Any) -> str:
    if value is None or value == "":
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _arrays(
    before: Mapping[str, Any], after: Mapping[str, Any], field: str
) -> list[str]:
    pairs = _pairs(before[field], after[field])
    # What changed its shape says more than what came or went with it.
    pairs.sort(key=lambda pair: pair[1] is None or pair[2] is None)
    named = [
        f"{_path(name)} {old or 'none'} -> {new or 'none'}"
        for name, old, new in pairs[:_NAMED]
    ]
    left = len(pairs) - len(named)
    if left:
        named.append(f"{left} more {field}")
    return named


def _path(name: str) -> str:
    """``['inputs']['latents']`` as ``inputs.latents``."""
    text = name.replace("']['", ".").replace("['", "", 1).replace("']", "")
    return text.replace("['", ".")


def _mesh(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def _flags(before: Any, after: Any) -> list[str]:
    gone = [f"{flag} is not set now" for flag in before if flag not in after]
    come = [f"{flag} is set now" for flag in after if flag not in before]
    return [f"compiler flag {text}" for text in (*gone, *come)]
