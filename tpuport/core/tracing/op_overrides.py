"""Operator overrides: claims on torch operators, checked before anything changes.

An override is data: the operator it claims, why, who claims it, and a factory that
makes the JAX implementation for one runtime (its mesh, platform and attention policy).
Two claims on one operator are an error before the first is installed. Installing
happens on one torchax environment and is undone on the way out, so nothing leaks into
``torchax.default_env()`` or another session.
"""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def _identity(operator: Any) -> str:
    """One name for an overload packet and for each of its overloads."""
    packet = getattr(operator, "overloadpacket", operator)
    qualified = getattr(packet, "_qualified_op_name", None)
    return f"op:{qualified}" if qualified else f"object:{id(packet)}"


def _resolve(override: OpOverride, target: str) -> Any:
    if override.define is not None:
        override.define()
    try:
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        raise OpConflictError(
            f"op override target {target!r} does not exist in the installed torch; "
            f"{override.owner!r} claims it ({override.reason})"
        ) from None


#: An operator and the override that claims it.
Claim = tuple[Any, OpOverride]


def resolve_claims(overrides: Sequence[OpOverride]) -> list[Claim]:
    """Every operator with the override that claims it.

    Raises:
        OpConflictError: an operator does not exist, or two claims meet.
    """
    claims, gone, conflicts = _examine(overrides)
    for error in gone.values():
        raise error
    if conflicts:
        raise OpConflictError(_conflict_text(itertools.chain(*conflicts.values())))
    return claims


@contextlib.contextmanager
def installed(claims: Sequence[Claim], env: Any, context: OpContext) -> Iterator[None]:
    """The overrides are in force on the torchax environment ``env`` in this block."""
    from torchax.ops.ops_registry import Operator

    overrides = dict.fromkeys(override for _, override in claims)
    made = {override: override.make(context) for override in overrides}
    saved = [(operator, env._ops.get(operator)) for operator, _ in claims]
    try:
        for operator, override in claims:
            env._ops[operator] = Operator(
                operator,
                made[override],
                is_jax_function=True,
                is_user_defined=True,
                needs_env=False,
                is_view_op=False,
            )
        yield
    finally:
        for operator, original in saved:
            if original is None:
                env._ops.pop(operator, None)
            else:
                env._ops[operator] = original


def inspect_overrides(overrides: Sequence[OpOverride]) -> tuple[OverrideStatus, ...]:
    """Whether each override could be installed with the others; never raises.

    Nothing is made or installed.
    """
    _, gone, conflicts = _examine(overrides)
    found = []
    for index, override in enumerate(overrides):
        state, detail = "applicable", override.reason
        if index in gone:
            state, detail = "gone", str(gone[index])
        elif index in conflicts:
            state, detail = "broken", _conflict_text(conflicts[index])
        found.append(OverrideStatus(override=override, state=state, detail=detail))
    return tuple(found)


def _examine(
    overrides: Sequence[OpOverride],
) -> tuple[list[Claim], dict[int, OpConflictError], dict[int, list[str]]]:
    """The claims, and by index the overrides that are gone or in conflicts."""
    claims: list[Claim] = []
    gone: dict[int, OpConflictError] = {}
    conflicts: dict[int, list[str]] = {}
    seen: dict[str, tuple[int, str]] = {}
    for index, override in enumerate(overrides):
        try:
            operators = [_resolve(override, target) for target in override.targets]
        except OpConflictError as error:
            gone[index] = error
            continue
        for target, operator in zip(override.targets, operators, strict=True):
            identity = _identity(operator)
            if identity not in seen:
                seen[identity] = (index, target)
                claims.append((operator, override))
                continue
            first, other_target = seen[identity]
            other = overrides[first]
            text = (
                f"{target} is claimed by {override.owner!r} ({override.reason}) and, "
                f"as {other_target}, by {other.owner!r} ({other.reason})"
            )
            for one in (first, index):
                conflicts.setdefault(one, []).append(text)
    return claims, gone, conflicts


def _conflict_text(conflicts: Iterable[str]) -> str:
    return (
        "conflicting op overrides: "
        + "; ".join(dict.fromkeys(conflicts))
        + ". Drop one of the claims; nothing was installed."
    )
