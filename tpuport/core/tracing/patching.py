"""Monkey patches as data: resolved all together, applied, undone in reverse order.

A patch names its target, the replacement, the reason and the upstream versions. Nothing
changes before every patch is known to fit. Undoing restores the original: a descriptor
as the descriptor, an inherited attribute by removing the class's own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement

from tpuport.core import compat
from tpuport.errors import PatchError

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Patch:
    """One replacement of one attribute of upstream code.

    Attributes:
        name: for messages and reports.
        target: ``"package.module:function"`` or ``"package.module:Class.attr"``.
        replacement: the new callable, or ``"module:attr"``, imported when applied. It
            may be a ``staticmethod``, ``classmethod`` or ``property``; a plain
            function that replaces a static or class method becomes one.
        reason: what is wrong with upstream's own.
        upstream: versions for the patch, such as ``"diffusers>=0.42,<0.43"``; empty
            for any.
        link: the upstream issue or source.
        wraps: ``replacement`` is called with the original function and returns the
            new one.

    Raises:
        PatchError: a path, the requirement or the reason is malformed.
    """

    name: str
    target: str
    replacement: Callable[..., Any] | str
    reason: str
    upstream: str
    link: str = ""
    wraps: bool = False

    def __post_init__(self) -> None:
        if not self.name or not self.reason:
            raise PatchError(
                f"patch {self.name!r} of {self.target!r} needs a name and a reason"
            )
        paths = [("target", self.target)]
        if isinstance(self.replacement, str):
            paths.append(("replacement", self.replacement))
        for what, path in paths:
            if not _PATH.fullmatch(path):
                raise PatchError(
                    f"patch {self.name!r}: {what} {path!r} is not of the form "
                    '"package.module:Class.attr" or "package.module:function"'
                )
        if self.upstream:
            try:
                requirement = Requirement(self.upstream)
            except InvalidRequirement as error:
                raise PatchError(
                    f"patch {self.name!r}: upstream {self.upstream!r} is not a "
                    f'requirement such as "diffusers>=0.42,<0.43": {error}'
                ) from None
            # Only name and versions are used: markers and extras would be lost.
            if requirement.marker or requirement.url or requirement.extras:
                raise PatchError(
                    f"patch {self.name!r}: upstream {self.upstream!r} may only have a "
                    "package name and versions"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchStatus:
    """What became, or would become, of one patch.

    Attributes:
        name: of the patch.
        target: of the patch.
        state: ``"applied"`` or ``"skipped"``; from :func:`inspect_patches`
            ``"applicable"``, ``"skipped"``, ``"gone"`` (the target does not exist) or
            ``"broken"``.
        detail: the patch's reason, or why it was skipped or cannot be applied.
    """

    name: str
    target: str
    state: str
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchReport:
    """The state of every patch, in the order given."""

    entries: tuple[PatchStatus, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {"patches": [asdict(entry) for entry in self.entries]}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Site:
    """A resolved patch: its place and the original.

    ``own`` is the entry of the owner's own ``__dict__``, as a tuple of one, or empty
    for an inherited attribute.
    """

    patch: Patch
    owner: Any
    attr: str
    own: tuple[Any, ...]
    new: Any

    def apply(self) -> None:
        setattr(self.owner, self.attr, self.new)

    def undo(self) -> None:
        """Put the original back.

        Raises:
            PatchError: somebody else replaced the attribute, which is left alone.
        """
        missing = object()
        now = vars(self.owner).get(self.attr, missing)
        if now is not self.new:
            found = "nothing" if now is missing else repr(now)
            raise PatchError(
                f"patch {self.patch.name!r}: {self.patch.target} was changed by "
                f"someone else while patched, it is now {found}; it was left so, and "
                "the original is not restored"
            )
        if self.own:
            setattr(self.owner, self.attr, self.own[0])
        else:
            delattr(self.owner, self.attr)


@contextlib.contextmanager
def applied(patches: Sequence[Patch]) -> Iterator[PatchReport]:
    """Apply patches for the length of the block; yields the state of each patch.

    Targets and versions are resolved first; nothing changes unless all fit. Patches are
    undone in reverse order, also after an error in the block or half-way through
    applying. Contexts must be left in the reverse order of entering.

    Raises:
        PatchError: a target or replacement does not exist or cannot be set, two
            patches that are for the installed versions claim the same target, or, on
            the way out, someone else replaced a patched attribute (raised after all
            others are undone; an error of the block is its ``__context__``).
    """
    sites, skipped = _resolve_all(patches)
    report = PatchReport(
        entries=tuple(
            _status(patch, "skipped", skipped[index])
            if index in skipped
            else _status(patch, "applied", patch.reason)
            for index, patch in enumerate(patches)
        )
    )
    done: list[_Site] = []
    try:
        for site in sites:
            _apply(site)
            done.append(site)
        yield report
    finally:
        _undo_all(done)


def inspect_patches(patches: Sequence[Patch]) -> PatchReport:
    """Whether each patch would apply here; never raises for a broken one.

    Target and replacement modules are imported, and factories of wrapping patches
    called, but nothing is replaced.
    """
    states: dict[int, PatchStatus] = {}
    sites: dict[int, _Site] = {}
    for index, patch in enumerate(patches):
        detail = _why_skipped(patch)
        if detail:
            states[index] = _status(patch, "skipped", detail)
            continue
        try:
            sites[index] = _resolve(patch)
        except PatchError as error:
            state = "gone" if isinstance(error, _TargetGoneError) else "broken"
            states[index] = _status(patch, state, str(error))
        else:
            states[index] = _status(patch, "applicable", patch.reason)
    for one, other in _conflicts(sites):
        for index in (one, other):
            detail = _conflict_text(sites[one], sites[other])
            states[index] = _status(patches[index], "broken", detail)
    return PatchReport(entries=tuple(states[i] for i in range(len(patches))))


def _resolve_all(patches: Sequence[Patch]) -> tuple[list[_Site], dict[int, str]]:
    """The sites to patch, and the reason of each skipped patch by index."""
    skipped: dict[int, str] = {}
    sites: dict[int, _Site] = {}
    for index, patch in enumerate(patches):
        detail = _why_skipped(patch)
        if detail:
            skipped[index] = detail
        else:
            sites[index] = _resolve(patch)
    for one, other in _conflicts(sites):
        raise PatchError(_conflict_text(sites[one], sites[other]))
    return list(sites.values()), skipped


def _why_skipped(patch: Patch) -> str:
    """Why the patch is not for the installed versions; empty if it is."""
    if not patch.upstream:
        return ""
    requirement = Requirement(patch.upstream)
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return f"for {patch.upstream}; {requirement.name} is not installed"
    # A pre-release in the range counts, whatever pip would choose.
    if not requirement.specifier.contains(version, prereleases=True):
        return f"for {patch.upstream}; {requirement.name} {version} is installed"
    return ""


def _resolve(patch: Patch) -> _Site:
    owner, attr = _owner(patch)
    if isinstance(owner, ModuleType):
        # Access first: a lazy module fills __dict__ on first access.
        raw = _attribute(patch, owner, attr)
    elif any(attr in vars(base) for base in owner.__mro__):
        raw = inspect.getattr_static(owner, attr)
    else:
        raise _gone(patch, f"{_describe(owner)} has no {attr!r}")
    own = (vars(owner)[attr],) if attr in vars(owner) else ()
    return _Site(
        patch=patch, owner=owner, attr=attr, own=own, new=_replacement(patch, raw)
    )


def _owner(patch: Patch) -> tuple[Any, str]:
    """The module or class to set an attribute on, and the attribute's name."""
    module, _, path = patch.target.partition(":")
    *parents, attr = path.split(".")
    try:
        if module.partition(".")[0] == "torchax":
            # compat makes torchax import beside torch versions that it is not for.
            compat.import_torchax()
        owner: Any = importlib.import_module(module)
    except Exception as error:
        # Upstream modules fail to import in many ways; then nothing can be patched.
        raise _gone(
            patch, f"module {module} does not import: {_error_text(error)}"
        ) from error
    for parent in parents:
        owner = _attribute(patch, owner, parent)
    if not isinstance(owner, ModuleType | type):
        raise PatchError(
            f"patch {patch.name!r}: target {patch.target} is an attribute of a "
            f"{type(owner).__name__}, not of a module or class"
        )
    return owner, attr


def _attribute(patch: Patch, owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError:
        raise _gone(patch, f"{_describe(owner)} has no {name!r}") from None
    except Exception as error:
        # A lazy module imports on access, which may fail in any way.
        raise _gone(
            patch, f"{name!r} of {_describe(owner)} raises {_error_text(error)}"
        ) from error


def _replacement(patch: Patch, raw: Any) -> Any:
    """What to set in place of ``raw``, the attribute as its owner stores it."""
    new = patch.replacement
    if isinstance(new, str):
        new = _imported(patch, new)
    kind = type(raw)
    is_method = isinstance(raw, staticmethod | classmethod)
    if patch.wraps:
        try:
            # A wrapper of a class method takes cls, so it needs the bare function.
            new = new(raw.__func__ if is_method else raw)
        except Exception as error:
            raise PatchError(
                f"patch {patch.name!r}: its replacement, called with the original of "
                f"{patch.target}, raised {_error_text(error)}"
            ) from error
    if isinstance(raw, property | functools.cached_property):
        if not isinstance(new, kind):
            raise PatchError(
                f"patch {patch.name!r}: {patch.target} is a {kind.__name__}, the "
                f"replacement is a {type(new).__name__}; replace it with a "
                f"{kind.__name__}"
            )
        return new
    if isinstance(new, staticmethod | classmethod):
        return new
    if not callable(new):
        raise PatchError(
            f"patch {patch.name!r}: the replacement of {patch.target} is {new!r}, "
            "which cannot be called"
        )
    return kind(new) if is_method else new


def _imported(patch: Patch, path: str) -> Any:
    module, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in names.split("."):
            found = getattr(found, name)
    except Exception as error:
        raise PatchError(
            f"patch {patch.name!r}: replacement {path} cannot be imported: "
            f"{_error_text(error)}"
        ) from error
    return found


def _conflicts(sites: dict[int, _Site]) -> list[tuple[int, int]]:
    """Pairs of indices that claim one attribute, even under different paths."""
    first: dict[tuple[int, str], int] = {}
    pairs = []
    for index, site in sites.items():
        claimed = first.setdefault((id(site.owner), site.attr), index)
        if claimed != index:
            pairs.append((claimed, index))
    return pairs


def _conflict_text(one: _Site, other: _Site) -> str:
    return (
        f"patches {one.patch.name!r} and {other.patch.name!r} both replace "
        f"{one.patch.target}; keep one of them, or give them upstream versions that "
        "do not overlap"
    )


def _apply(site: _Site) -> None:
    try:
        site.apply()
    except Exception as error:
        raise PatchError(
            f"patch {site.patch.name!r}: {site.patch.target} cannot be set: "
            f"{_error_text(error)}"
        ) from error


def _undo_all(done: Sequence[_Site]) -> None:
    problems = []
    for site in reversed(done):
        try:
            site.undo()
        except PatchError as error:
            problems.append(str(error))
        except Exception as error:
            problems.append(
                f"patch {site.patch.name!r}: {site.patch.target} cannot be restored: "
                f"{_error_text(error)}"
            )
    if problems:
        raise PatchError("; ".join(problems))


def _status(patch: Patch, state: str, detail: str) -> PatchStatus:
    return PatchStatus(name=patch.name, target=patch.target, state=state, detail=detail)


class _TargetGoneError(PatchError):
    """A target does not exist; callers see it as a PatchError."""


def _gone(patch: Patch, found: str) -> PatchError:
    versions = f" (written for {patch.upstream})" if patch.upstream else ""
    return _TargetGoneError(
        f"patch {patch.name!r}: target {patch.target} does not exist, {found}; the "
        f"patch must be adapted to the installed version{versions} or removed"
    )


def _describe(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return f"module {owner.__name__}"
    if isinstance(owner, type):
        return f"class {owner.__module__}.{owner.__qualname__}"
    return f"a {type(owner).__name__}"


def _error_text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
