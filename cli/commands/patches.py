"""``tpuport patches``: what is changed in upstream code while it is traced, and why."""

from __future__ import annotations

import functools
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import typer
from packaging.requirements import Requirement

from tpuport.cli.asked.environment import looking, prepare
from tpuport.cli.asked.options import command, flag
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.output import give_out
from tpuport.cli.shown.tables import columns
from tpuport.core.enums import Blocks
from tpuport.core.files.atomic import one_line
from tpuport.core.files.fingerprint import version
from tpuport.core.reports import plural
from tpuport.core.spec.model_plugin import ModelPlugin
from tpuport.core.spec.run_settings import read_value
from tpuport.core.tracing.op_overrides import OpOverride, inspect_overrides
from tpuport.core.tracing.patching import Patch, inspect_patches
from tpuport.errors import PatchError, UsageError, did_you_mean
from tpuport.plugins import get_model, model_plugins

_WIDTH = 100
#: State -> what is said of one entry and of several; best first.
_SAID = {
    "applicable": ("applies", "apply"),
    "skipped": ("not for this version", "not for this version"),
    "broken": ("cannot be applied", "cannot be applied"),
    "gone": ("target is gone", "without a target"),
}
_STATES = list(_SAID)
#: The states in which a model that uses the change fails.
_WRONG = ("gone", "broken")

Entry = dict[str, Any]
"""One patch or op override, and what would become of it here, as ``--json`` has it.

``name`` is of the patch; of an override it is the last part of its first target.
``targets`` are replaced, as declared. ``upstream`` are the versions that it is for,
such as ``"diffusers>=0.42,<0.43"``, and ``installed`` is what was found of the package.
``blocks`` names the ``--blocks`` with which alone a patch is in force. ``module`` is
where the replacement is defined. ``state`` is a key of :data:`_SAID`, and ``detail`` is
the reason again, or why the change is skipped or cannot be applied.
"""


@command(
    "patches",
    name=typer.Argument(
        metavar="[NAME]", help="A patch or override, to see all of it."
    ),
    model=flag("--model", "Only what this model uses. (default: all models)"),
)
def patches(
    settings: Settings, name: str | None = None, model: str | None = None
) -> None:
    """List the changes to upstream code, or show one of them in full.

    A patch replaces a function; some patches belong to one kind of --blocks. An op
    override replaces torchax's version of a torch operator. This command changes
    nothing. It fails if upstream no longer has what a patch replaces.

    Example: tpuport patches layer_norm
    """
    entries: list[Entry] = []
    models = model_plugins()
    if model is not None:
        models = [read_value(get_model, model, "--model")]
    prepare(debug=settings.debug)
    with looking("looking at upstream's code"):
        known = _names(models)
        if name is None or name in known:  # else diffusers need not be imported
            entries = [e for e in examine(models) if name in (None, e["name"])]
    if not entries and name is not None:
        near = did_you_mean(name, known, "`tpuport patches` lists them")
        raise UsageError(f"no patch is called {name!r}; {near}")
    text = _table(entries)
    if name is not None:
        text = [line for entry in entries for line in _block(entry)]
    give_out({"patches": entries}, as_json=settings.json, text=text)
    wrong = [entry["detail"] for entry in entries if entry["state"] in _WRONG]
    if wrong:
        raise PatchError("; ".join(dict.fromkeys(wrong)))


def _changes(model: ModelPlugin) -> list[tuple[str, Sequence[Any]]]:
    """The patches in force by blocks, upstream's first, then the overrides."""
    from tpuport.patches.standard import OVERRIDES, PATCHES

    return [
        *((b, (*PATCHES, *model.patches_with(b))) for b in reversed(Blocks)),
        ("", (*OVERRIDES, *model.overrides)),
    ]


def _names(models: Iterable[ModelPlugin]) -> list[str]:
    """The names of all patches and overrides, without a look at upstream's code."""
    changes = [things for model in models for _, things in _changes(model)]
    return sorted({thing.name for things in changes for thing in things})


def examine(models: Iterable[ModelPlugin]) -> list[Entry]:
    """Every patch, then every override, of all models, each once.

    Patches that one kind of blocks has alone are among them and say so.
    """
    found: dict[Patch | OpOverride, Entry] = {}
    for model in models:
        for blocks, things in _changes(model):
            inspect: Any = inspect_patches if blocks else inspect_overrides
            for thing, status in zip(things, inspect(things), strict=True):
                entry = found.setdefault(thing, _entry(thing, blocks))
                if entry["blocks"] != blocks:
                    entry["blocks"] = ""
                # Where models or blocks differ, the worst is told.
                if _STATES.index(status.state) >= _STATES.index(entry["state"]):
                    entry["state"], entry["detail"] = status.state, status.detail
                if model.name not in entry["models"]:
                    entry["models"].append(model.name)
    return sorted(found.values(), key=lambda entry: entry["kind"] != "patch")


def _entry(thing: Patch | OpOverride, blocks: str) -> Entry:
    if isinstance(thing, Patch):
        kind, targets, new = "patch", [thing.target], thing.replacement
        upstream, link = thing.upstream, thing.link
    else:
        # It stands in for what torchax has, of any version.
        kind, targets, new = "override", list(thing.targets), thing.make
        upstream, link = "torchax", ""
    return {
        "name": thing.name,
        "kind": kind,
        "targets": targets,
        "reason": thing.reason,
        "upstream": upstream,
        "installed": version(_package(upstream)) if upstream else None,
        "models": [],
        "blocks": blocks,
        "module": _module(new),
        "link": link,
        "state": "applicable",
        "detail": "",
    }


def _package(upstream: str) -> str:
    return Requirement(upstream).name


def _module(new: Callable[..., Any] | str) -> str:
    """Where a replacement, which may be a path or a descriptor, is defined."""
    if isinstance(new, str):
        return new.partition(":")[0]
    found: Any = new
    if isinstance(found, property):
        found = found.fget
    while isinstance(found, functools.partial | functools.cached_property):
        found = found.func
    # Static and class methods have the module of their function.
    return str(getattr(found, "__module__", type(found).__module__))


def _table(entries: list[Entry]) -> list[str]:
    kinds = Counter(entry["kind"] for entry in entries)
    states = Counter(entry["state"] for entry in entries)
    totals = [f"{states[s]} {_SAID[s][1]}" for s in _STATES if states[s]]
    if states["applicable"] == len(entries):
        totals = ["all apply"]
    lines = [
        f"{plural(kinds['patch'], 'patch')} and "
        f"{plural(kinds['override'], 'op override')}: {', '.join(totals)}"
    ]
    rows = [
        (entry["name"], entry["kind"], _status(entry), ", ".join(entry["models"]))
        for entry in entries
    ]
    return [*lines, *columns(rows, indent="  "), "more of one: tpuport patches NAME"]


def _status(entry: Entry) -> str:
    said = _SAID[entry["state"]][0]
    if entry["state"] != "skipped":
        return said
    found = entry["installed"] or f"no {_package(entry['upstream'])}"
    return f"{said} (found {found})"


def _block(entry: Entry) -> list[str]:
    rows = [
        *((entry["kind"], target) for target in entry["targets"]),
        ("why", entry["reason"]),
        ("for", _versions(entry)),
        ("used by", ", ".join(entry["models"])),
        ("in", entry["module"]),
    ]
    if entry["blocks"]:
        rows.append(("in force", f"with --blocks {entry['blocks']}"))
    if entry["link"]:
        rows.append(("link", entry["link"]))
    if entry["state"] in _WRONG:
        rows.append(("problem", one_line(entry["detail"])))
    lines = [f"{entry['name']}: {_status(entry)}"]
    for label, text in rows:
        # Names and links stay whole, also where they do not fit: they are to be copied.
        lines += textwrap.wrap(
            text,
            _WIDTH,
            initial_indent=f"  {label:<8}  ",
            subsequent_indent=" " * 12,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines


def _versions(entry: Entry) -> str:
    wanted = entry["upstream"]
    if not wanted:
        return "any version"
    which = wanted if Requirement(wanted).specifier else f"any {wanted}"
    return f"{which}; found {entry['installed'] or 'none'}"
