"""Operator overrides: claims on torch operators, checked before anything changes.

An override is data: the operator it claims, why, who claims it, and a factory that
makes the JAX implementation for one runtime (its mesh, platform and attention policy).
Two claims on one operator are an error before the first is installed. Installing
happens on one torchax environment and is undone on the way out, so nothing leaks into
``torchax.default_env()`` or another session.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpuport.core.tracing.context import OpContext
from tpuport.errors import OpConflictError


@dataclass(frozen=True, kw_only=True, slots=True)
class OpOverride:
    """One claim on torch operators.

    Attributes:
        targets: dotted names, such as ``torch.nn.functional.layer_norm`` or
            ``torch.ops.aten.native_layer_norm``; all get the same implementation.
        make: returns the implementation for a context. It is called with JAX arrays
            in place of tensors and must honour the torch signature whole.
        owner: who claims the operator, for messages.
        reason: what is wrong with torchax's own implementation.
        define: makes operators that torch does not have; called before every look-up of
            the operators.
    """

    targets: tuple[str, ...]
    make: Callable[[OpContext], Callable[..., Any]]
    owner: str
    reason: str
    define: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        """Name in reports: last part of the first target, such as ``layer_norm``."""
        return self.targets[0].rpartition(".")[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class OverrideStatus:
    """Whether one override could be installed.

    Attributes:
        override: the override.
        state: ``"applicable"``, ``"gone"`` (an operator does not exist) or ``"broken"``
            (the operator is claimed twice).
        detail: the override's reason, or why the override cannot be installed.
    """

    override: OpOverride
    state: str
    detail: str


def resolve_operator(target: str) -> Any:
    """The object that a dotted operator name stands for.

    Raises:
        OpConflictError: the installed torch has no such operator.
    """
    parts = target.split(".")
    try:
        found: Any = importlib.import_module(parts[0])
    except ImportError as error:
        raise OpConflictError(
            f"op override target {target!r} does not exist: {parts[0]} does not "
            f"import: {error}"
        ) from None
    for done, part in enumerate(parts[1:], start=1):
        try:
            found = getattr(found, part)
        except AttributeError:
            where = ".".join(parts[:done])
            raise OpConflictError(
                f"op override target {target!r} does not exist: {where} has no "
                f"{part!r} in the installed torch"
            ) from None
    return found


def _identity(operator: Any) -> str:
    """One name for an overload packet and for each of its overloads."""
    packet = getattr(operator, "overloadpacket", operator)
    qualified = getattr(packet, "_qualified_op_name", None)
    return f"op:{qualified}" if qualified else f"object:{id(packet)}"


def _resolve(override: OpOverride, target: str) -> Any:
    if override.define is not None:
        override.define()
    try:
        return resolve_operator(target)
    except OpConflictError as error:
        raise OpConflictError(
            f"{error}; {override.owner!r} claims it ({override.reason})"
        ) from None


class OpRegistry:
    """Collects claims, finds conflicts, then installs on an environment."""

    def __init__(self, overrides: Sequence[OpOverride] = ()) -> None:
        self._overrides: list[OpOverride] = []
        for override in overrides:
            self.claim(override)

    @property
    def overrides(self) -> tuple[OpOverride, ...]:
        """The claims, in the order they were made."""
        return tuple(self._overrides)

    def claim(self, override: OpOverride) -> None:
        """Record a claim; nothing is resolved, imported or changed."""
        self._overrides.append(override)

    def resolve(self) -> list[tuple[Any, OpOverride]]:
        """Every (operator, claim) pair.

        Raises:
            OpConflictError: an operator does not exist, or two claims meet.
        """
        pairs: list[tuple[Any, OpOverride]] = []
        seen: dict[str, tuple[str, OpOverride]] = {}
        conflicts: list[str] = []
        for override in self._overrides:
            for target in override.targets:
                operator = _resolve(override, target)
                identity = _identity(operator)
                if identity in seen:
                    other_target, other = seen[identity]
                    conflicts.append(
                        f"{target} is claimed by {override.owner!r} "
                        f"({override.reason}) and, as {other_target}, by "
                        f"{other.owner!r} ({other.reason})"
                    )
                    continue
                seen[identity] = (target, override)
                pairs.append((operator, override))
        if conflicts:
            raise OpConflictError(
                "conflicting op overrides: "
                + "; ".join(conflicts)
                + ". Drop one of the claims; nothing was installed."
            )
        return pairs

    @contextlib.contextmanager
    def install(self, env: Any, context: OpContext) -> Iterator[tuple[str, ...]]:
        """Install every claim on ``env``; yields the claimed names; restores on exit.

        Raises:
            OpConflictError: see :meth:`resolve`; ``env`` is then untouched.
        """
        from torchax.ops.ops_registry import Operator

        pairs = self.resolve()
        implementations: dict[int, Callable[..., Any]] = {}
        for _, override in pairs:
            if id(override) not in implementations:
                implementations[id(override)] = override.make(context)
        saved: list[tuple[Any, Any]] = []
        try:
            for operator, override in pairs:
                saved.append((operator, env._ops.get(operator)))
                env._ops[operator] = Operator(
                    operator,
                    implementations[id(override)],
                    is_jax_function=True,
                    is_user_defined=True,
                    needs_env=False,
                    is_view_op=False,
                )
            yield tuple(t for o in self._overrides for t in o.targets)
        finally:
            for operator, original in reversed(saved):
                if original is None:
                    env._ops.pop(operator, None)
                else:
                    env._ops[operator] = original


def inspect_overrides(overrides: Sequence[OpOverride]) -> tuple[OverrideStatus, ...]:
    """Whether each override could be installed with the others; never raises.

    Nothing is made or installed.
    """
    problems: dict[int, tuple[str, str]] = {}
    for index, override in enumerate(overrides):
        try:
            for target in override.targets:
                _resolve(override, target)
        except OpConflictError as error:
            problems[index] = ("gone", str(error))
    left = [index for index in range(len(overrides)) if index not in problems]
    for group in (*((index,) for index in left), *itertools.combinations(left, 2)):
        try:
            OpRegistry([overrides[index] for index in group]).resolve()
        except OpConflictError as error:
            problems |= {index: ("broken", str(error)) for index in group}
    return tuple(
        OverrideStatus(override=override, state=state, detail=detail)
        for override, (state, detail) in (
            (o, problems.get(i, ("applicable", o.reason)))
            for i, o in enumerate(overrides)
        )
    )
