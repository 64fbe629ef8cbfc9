"""Monkey patches as data: resolved all together, applied, undone in reverse order.

A patch names its target, the replacement, the reason and the upstream versions. Nothing
changes before every patch is known to fit. Undoing restores the original: a descriptor
as the descriptor, an inherited attribute by removing the class's own.
"""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Status:
    """What became, or would become, of one patch or op override.

    Attributes:
        name, target: of the patch.
        state: ``"applied"``, ``"applicable"``, ``"skipped"`` (for other versions),
            ``"gone"`` (the target does not exist) or ``"broken"``.
        detail: the patch's reason, or why it was skipped or cannot be applied.
    """

    name: str
    target: str
    state: str
    detail: str


class Gone:
    """Of an error: a target does not exist."""


class _TargetGoneError(PatchError, Gone):
    """A target does not exist; callers see it as a PatchError."""


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
        try:
            setattr(self.owner, self.attr, self.new)
        except Exception as error:
            problem = f"{self.patch.target} cannot be set: {_text(error)}"
            raise _error(self.patch, problem) from error

    def undo(self) -> None:
        """Put the original back.

        Raises:
            PatchError: somebody else replaced the attribute, which is left alone.
        """
        missing = object()
        now = vars(self.owner).get(self.attr, missing)
        if now is not self.new:
            found = "nothing" if now is missing else repr(now)
            raise _error(
                self.patch,
                f"{self.patch.target} was changed by someone else while patched, it is "
                f"now {found}; it was left so, and the original is not restored",
            )
        if self.own:
            setattr(self.owner, self.attr, self.own[0])
        else:
            delattr(self.owner, self.attr)


@contextlib.contextmanager
def applied(patches: Sequence[Patch]) -> Iterator[tuple[Status, ...]]:
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
    found = _examine(patches)
    for one in found:
        if isinstance(one, PatchError):
            raise one
    with contextlib.ExitStack() as stack:
        for site in found:
            if isinstance(site, _Site):
                site.apply()
                stack.callback(site.undo)
        yield states(patches, found, "applied")


def inspect_patches(patches: Sequence[Patch]) -> tuple[Status, ...]:
    """Whether each patch would apply here; never raises for a broken one.

    Target and replacement modules are imported, and factories of wrapping patches
    called, but nothing is replaced.
    """
    return states(patches, _examine(patches), "applicable")


_Found = _Site | str | PatchError
"""Where a patch applies, why it is skipped, or why it cannot be applied."""


def _examine(patches: Sequence[Patch]) -> list[_Found]:
    found: list[_Found] = []
    # Two paths may lead to one attribute.
    first: dict[tuple[int, str], int] = {}
    for index, patch in enumerate(patches):
        try:
            site = _why_skipped(patch) or _resolve(patch)
        except PatchError as error:
            found.append(error)
            continue
        found.append(site)
        if isinstance(site, str):
            continue
        other = first.setdefault((id(site.owner), site.attr), index)
        if other != index:
            found[other] = found[index] = PatchError(
                f"patches {patches[other].name!r} and {patch.name!r} both replace "
                f"{patches[other].target}; keep one of them, or give them upstream "
                "versions that do not overlap"
            )
    return found


def states(
    changes: Sequence[Any], found: Sequence[Any], fits: str
) -> tuple[Status, ...]:
    """The state of each patch or override.

    Args:
        found: for each an error, why it is skipped, or anything else if it fits.
        fits: the state of one that fits.
    """
    told = []
    for change, one in zip(changes, found, strict=True):
        state, detail = fits, change.reason
        if isinstance(one, Exception):
            state, detail = "gone" if isinstance(one, Gone) else "broken", str(one)
        elif isinstance(one, str):
            state, detail = "skipped", one
        told.append(Status(change.name, change.target, state, detail))
    return tuple(told)


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
    module, _, path = patch.target.partition(":")
    parents, _, attr = path.rpartition(".")
    try:
        if module.partition(".")[0] == "torchax":
            # compat makes torchax import beside torch versions that it is not for.
            compat.import_torchax()
        owner: Any = pkgutil.resolve_name(f"{module}:{parents}")
        if isinstance(owner, type):
            raw = _of_class(owner, attr)
        else:
            # Access first: a lazy module fills __dict__ on first access.
            raw = getattr(owner, attr)
    except Exception as error:
        # Upstream modules fail to import in many ways; then nothing can be patched.
        versions = f" (written for {patch.upstream})" if patch.upstream else ""
        raise _TargetGoneError(
            f"patch {patch.name!r}: target {patch.target} does not exist, "
            f"{_text(error)}; the patch must be adapted to the installed version"
            f"{versions} or removed"
        ) from error
    if not isinstance(owner, ModuleType | type):
        raise _error(
            patch,
            f"target {patch.target} is an attribute of a {type(owner).__name__}, not "
            "of a module or class",
        )
    own = (vars(owner)[attr],) if attr in vars(owner) else ()
    return _Site(
        patch=patch, owner=owner, attr=attr, own=own, new=_replacement(patch, raw)
    )


def _of_class(owner: type, attr: str) -> Any:
    """An attribute as the class stores it, and none of the metaclass."""
    for base in owner.__mro__:
        if attr in vars(base):
            return vars(base)[attr]
    raise AttributeError(f"type object {owner.__qualname__!r} has no {attr!r}")


def _replacement(patch: Patch, raw: Any) -> Any:
    """What to set in place of ``raw``, the attribute as its owner stores it."""
    new = patch.replacement
    if isinstance(new, str):
        try:
            new = pkgutil.resolve_name(new)
        except Exception as error:
            problem = f"replacement {new} cannot be imported: {_text(error)}"
            raise _error(patch, problem) from error
    kind = type(raw)
    is_method = isinstance(raw, staticmethod | classmethod)
    if patch.wraps:
        try:
            # A wrapper of a class method takes cls, so it needs the bare function.
            new = new(raw.__func__ if is_method else raw)
        except Exception as error:
            problem = f"its replacement, called with the original of {patch.target}"
            raise _error(patch, f"{problem}, raised {_text(error)}") from error
    if isinstance(raw, property | functools.cached_property):
        if not isinstance(new, kind):
            raise _error(
                patch,
                f"{patch.target} is a {kind.__name__}, the replacement is a "
                f"{type(new).__name__}; replace it with a {kind.__name__}",
            )
        return new
    if isinstance(new, staticmethod | classmethod):
        return new
    if not callable(new):
        raise _error(
            patch,
            f"the replacement of {patch.target} is {new!r}, which cannot be called",
        )
    return kind(new) if is_method else new


def _error(patch: Patch, problem: str) -> PatchError:
    return PatchError(f"patch {patch.name!r}: {problem}")


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
