"""Where every weight goes: rules claim weights, are checked against all, then applied.

A rule that matches nothing, a weight that no rule or two rules match, and a dim that
does not divide its axis are errors that name the thing; there is no catch-all and no
silent fallback to replication.

Names and shapes are torch's: the weight of ``torch.nn.Linear`` is [out, in], so
``("tp", None)`` splits the outputs and ``(None, "tp")`` the inputs.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tpuport.core.reports import bytes_text, plural
from tpuport.errors import ShardingError

if TYPE_CHECKING:
    import jax


Spec = tuple[str | tuple[str, ...] | None, ...]
"""One entry per dim: a mesh axis, several, or ``None``; ``()`` replicates any rank."""

DEFAULT_LAYOUT = "default"
"""The layout of a component's own rules."""

GATHERED = "gathered"
"""As by default, and stacked blocks are held in parts though they fit."""

_NAMES_SHOWN = 3


class UndividedError(ShardingError):
    """The rules fit the weights, but axes of the mesh do not divide dims.

    Attributes:
        split: the axes that split a dim together -> sizes of all dims that they split.
    """

    def __init__(self, text: str, split: Mapping[tuple[str, ...], set[int]]) -> None:
        super().__init__(text)
        self.split = split


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRule:
    """A claim on the weights whose whole name a regex matches.

    Attributes:
        pattern: a regex for the full name.
        spec: the mesh axes that split each dim.
        optional: may match nothing, for weights that only some configs have.

    Raises:
        ShardingError: the pattern is not a regex, or the spec not a tuple of axis
            names, tuples of axis names, and ``None``.
    """

    pattern: str
    spec: Spec
    optional: bool = False

    def __post_init__(self) -> None:
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise ShardingError(
                f"sharding rule {self.pattern!r} is not a regex: {error}"
            ) from None
        if not isinstance(self.spec, tuple) or not all(map(_is_entry, self.spec)):
            raise ShardingError(
                f"sharding rule {self.pattern!r} has the spec {self.spec!r}; write one "
                'entry per dim, such as ("tp", None) or (("sp", "tp"), None), or () '
                "to replicate"
            )


@dataclass(frozen=True, slots=True)
class RuleUse:
    """A rule, the number of weights that it matches, and their bytes, unsplit."""

    pattern: str
    spec: Spec
    matches: int
    bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingPlan:
    """Where the weights of one component go on one mesh.

    Attributes:
        component: name of the component.
        mesh: axis name -> size.
        rules: every rule with its use, in the order given.
        assignments: weight name -> spec of the first rule that matches.
        total_bytes: bytes of all weights, each counted once.
        bytes_per_device: bytes that each device holds.
        replicated_bytes: bytes of weights that every device holds whole; all weights on
            a mesh of one device.
        held: specs of weights that are held in more parts than in ``assignments`` and
            gathered for use; see :mod:`tpuport.core.weights.gathering`.
        gathered_over: the axes of these parts.
        gathered_bytes_per_device: bytes that parts save on each device.
        streamed: weights that wait in the host's memory; see
            :mod:`tpuport.core.weights.streaming`. ``bytes_per_device`` is without them.
        host_bytes_per_device: of these, what each device streams.
    """

    component: str
    mesh: Mapping[str, int]
    rules: tuple[RuleUse, ...]
    assignments: Mapping[str, Spec]
    total_bytes: int
    bytes_per_device: int
    replicated_bytes: int
    held: Mapping[str, Spec] = field(default_factory=dict)
    gathered_over: tuple[str, ...] = ()
    gathered_bytes_per_device: int = 0
    streamed: frozenset[str] = frozenset()
    host_bytes_per_device: int = 0

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; the spec of every weight is left out."""
        return {
            "component": self.component,
            "mesh": dict(self.mesh),
            "rules": [{**asdict(u), "spec": _json_spec(u.spec)} for u in self.rules],
            "total_bytes": self.total_bytes,
            "bytes_per_device": self.bytes_per_device,
            "replicated_bytes": self.replicated_bytes,
            "gathered": {
                "over": list(self.gathered_over),
                "weights": len(self.held),
                "bytes_per_device": self.gathered_bytes_per_device,
            },
            "streamed": {
                "weights": len(self.streamed),
                "host_bytes_per_device": self.host_bytes_per_device,
            },
        }

    def table(self) -> list[tuple[str, str, str, str]]:
        """A table for people: a head, and a row for each rule that has weights."""
        rows = [("spec", "weights", "bytes", "pattern")]
        rows += [
            (_spec_text(u.spec), str(u.matches), bytes_text(u.bytes), u.pattern)
            for u in self.rules
            # Leave out rules without weights: they are for other configs.
            if u.matches
        ]
        return rows

    def remarks(self) -> list[str]:
        """Lines for people, below the table: the totals."""
        told = [
            f"total {bytes_text(self.total_bytes)}, "
            f"{bytes_text(self.bytes_per_device)} per device, of that "
            f"{bytes_text(self.replicated_bytes)} replicated"
        ]
        if self.held:
            told.append(
                f"{len(self.held)} weights in parts over "
                f"{'+'.join(self.gathered_over)}, gathered block by block: "
                f"{bytes_text(self.gathered_bytes_per_device)} per device less"
            )
        if self.streamed:
            told.append(
                f"{len(self.streamed)} weights on the host, streamed block by block: "
                f"{bytes_text(self.host_bytes_per_device)} per device"
            )
        return told


def plan_sharding(
    rules: Sequence[ShardRule],
    weights: Mapping[str, Any],
    mesh_shape: Mapping[str, int],
    *,
    component: str,
) -> ShardingPlan:
    """Match rules with weights; nothing is placed and no array is read.

    Args:
        rules: exactly one rule must match each weight.
        weights: name -> object with a shape and a dtype: a torch tensor, an array, or
            ``jax.ShapeDtypeStruct``.
        mesh_shape: axis name -> size, all axes of the mesh.

    Raises:
        UndividedError: the mesh alone does not fit; lists every weight.
        ShardingError: lists every weight and rule that does not fit.
    """
    problems = _Problems(component, dict(mesh_shape))
    for rule in rules:
        problems.check_rule(rule)
    compiled = [re.compile(rule.pattern) for rule in rules]
    matched: list[list[str]] = [[] for _ in rules]
    nbytes = {name: weight_bytes(weight) for name, weight in weights.items()}
    ways = dict.fromkeys(weights, 1)
    assignments: dict[str, Spec] = {}
    for name, weight in weights.items():
        found = [i for i, regex in enumerate(compiled) if regex.fullmatch(name)]
        for index in found:
            matched[index].append(name)
        if found:
            rule = rules[found[0]]
            assignments[name] = rule.spec
            ways[name] = problems.parts(name, tuple(weight.shape), rule)
        if len(found) > 1:
            listed = " and ".join(repr(rules[i].pattern) for i in found)
            problems.add(f"rules {listed} match the same weight", name)
    if unmatched := [name for name in weights if name not in assignments]:
        size = bytes_text(sum(nbytes[name] for name in unmatched))
        told = f"no rule matches {plural(len(unmatched), 'weight')} of {component}"
        problems.add(f"{told} ({size})", *unmatched)
    for rule, names in zip(rules, matched, strict=True):
        if not names and not rule.optional:
            problems.add(
                f"rule {rule.pattern!r} matches no weight of {component}; correct "
                "it, or set optional=True if only some configs have the weight"
            )
    problems.check()
    return ShardingPlan(
        component=component,
        mesh=problems.mesh,
        rules=tuple(
            RuleUse(rule.pattern, rule.spec, len(names), sum(nbytes[n] for n in names))
            for rule, names in zip(rules, matched, strict=True)
        ),
        assignments=assignments,
        total_bytes=sum(nbytes.values()),
        bytes_per_device=sum(size // ways[name] for name, size in nbytes.items()),
        replicated_bytes=sum(n for name, n in nbytes.items() if ways[name] == 1),
    )


def named_shardings(
    plan: ShardingPlan, mesh: jax.sharding.Mesh
) -> dict[str, jax.sharding.NamedSharding]:
    """The jax sharding in which every weight of the plan is held, by name.

    Raises:
        ShardingError: the plan is for a mesh of another shape.
    """
    from jax.sharding import NamedSharding, PartitionSpec

    if dict(plan.mesh) != dict(mesh.shape):
        raise ShardingError(
            f"sharding of {plan.component} is planned for mesh "
            f"{_mesh_text(plan.mesh)}, not for {_mesh_text(mesh.shape)}; plan it again"
        )
    return {
        name: NamedSharding(mesh, PartitionSpec(*spec))
        for name, spec in {**plan.assignments, **plan.held}.items()
    }


@dataclass
class _Problems:
    """Collects problems; one problem of many weights becomes one line."""

    component: str
    mesh: dict[str, int]
    # Line -> its weights. Blocks of a model repeat, and so would the line.
    found: dict[str, list[str]] = field(default_factory=dict)
    undivided: set[str] = field(default_factory=set)
    split: dict[tuple[str, ...], set[int]] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse a plan with problems.

        Raises:
            ShardingError: lists all problems.
        """
        if not self.found:
            return
        told = (
            f"sharding of {self.component} on mesh {_mesh_text(self.mesh)} has "
            f"{plural(len(self.found), 'problem')}:"
        )
        for text, names in self.found.items():
            told += f"\n  - {text}" + (f": {_names_text(names)}" if names else "")
        if self.undivided == self.found.keys():
            raise UndividedError(told, self.split)
        raise ShardingError(told)

    def add(self, text: str, *names: str) -> None:
        self.found.setdefault(text, []).extend(names)

    def check_rule(self, rule: ShardRule) -> None:
        uses = Counter(axis for entry in rule.spec for axis in spec_axes(entry))
        for axis, count in uses.items():
            if axis not in self.mesh:
                self.add(
                    f"rule {rule.pattern!r} names mesh axis {axis!r}, the mesh has "
                    f"{', '.join(self.mesh)}"
                )
            if count > 1:
                self.add(
                    f"rule {rule.pattern!r} uses mesh axis {axis!r} {count} times in "
                    f"{_spec_text(rule.spec)}; an axis can split one dim"
                )

    def parts(self, name: str, shape: tuple[int, ...], rule: ShardRule) -> int:
        """Number of parts of a weight; 1 if it cannot be split."""
        if rule.spec and len(rule.spec) != len(shape):
            self.add(
                f"rule {rule.pattern!r} has a spec of rank {len(rule.spec)}, "
                f"{_spec_text(rule.spec)}, for a weight of rank {len(shape)}, shape "
                f"{list(shape)}",
                name,
            )
            return 1
        ways = 1
        for dim, entry in enumerate(rule.spec):
            # What is wrong with an axis by itself is told with the rule: one that the
            # mesh lacks counts as size 1, and one that is named twice counts once.
            axes = [a for a in dict.fromkeys(spec_axes(entry)) if a in self.mesh]
            parts = math.prod(self.mesh[axis] for axis in axes)
            self.split.setdefault(tuple(axes), set()).add(shape[dim])
            if shape[dim] % parts:
                text = (
                    f"rule {rule.pattern!r} splits dim {dim} of size {shape[dim]} "
                    f"(shape {list(shape)}) over mesh axis {'+'.join(axes)} of "
                    f"size {parts}, which does not divide it"
                )
                self.add(text, name)
                self.undivided.add(text)
            else:
                ways *= parts
        return ways


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, tuple):
        return bool(entry) and all(isinstance(axis, str) for axis in entry)
    return entry is None or isinstance(entry, str)


def spec_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one dim's entry in a spec."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry


def weight_bytes(weight: Any) -> int:
    """Bytes of a tensor or an array, unsplit."""
    return math.prod(weight.shape) * int(weight.dtype.itemsize)


def _json_spec(spec: Spec) -> list[Any]:
    return [list(entry) if isinstance(entry, tuple) else entry for entry in spec]


def _spec_text(spec: Spec) -> str:
    if not spec:
        return "replicated"
    return "[" + ", ".join("+".join(spec_axes(entry)) or "-" for entry in spec) + "]"


def _mesh_text(mesh: Mapping[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in mesh.items())


def _names_text(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_NAMES_SHOWN])
    more = len(names) - _NAMES_SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
