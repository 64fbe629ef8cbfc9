"""Operator overrides: claims on torch operators, checked before anything changes.

An override is data: the operator it claims, why, who claims it, and a factory that
makes the JAX implementation for one runtime (its mesh, platform and attention policy).
Two claims on one operator are an error before the first is installed. Installing
happens on one torchax environment and is undone on the way out, so nothing leaks into
``torchax.default_env()`` or another session.
"""

from __future__ import annotations

import contextlib
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tpuport.core.tracing.context import OpContext
from tpuport.core.tracing.patching import Gone, Status, states
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

    @property
    def target(self) -> str:
        return ", ".join(self.targets)


class _OperatorGoneError(OpConflictError, Gone):
    """An operator does not exist; callers see it as an OpConflictError."""


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
        raise _OperatorGoneError(
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
    claims: list[Claim] = []
    for override, found in zip(overrides, _examine(overrides), strict=True):
        if isinstance(found, OpConflictError):
            raise found
        claims += [(operator, override) for operator in found]
    return claims


@contextlib.contextmanager
def installed(claims: Sequence[Claim], env: Any, context: OpContext) -> Iterator[None]:
    """The overrides are in force on the torchax environment ``env`` in this block."""
    from unittest import mock  # takes as long to import as the command line

    from torchax.ops.ops_registry import Operator

    overrides = dict.fromkeys(override for _, override in claims)
    made = {override: override.make(context) for override in overrides}
    operators = {
        operator: Operator(
            operator,
            made[override],
            is_jax_function=True,
            is_user_defined=True,
            needs_env=False,
            is_view_op=False,
        )
        for operator, override in claims
    }
    with mock.patch.dict(env._ops, operators):
        yield


def inspect_overrides(overrides: Sequence[OpOverride]) -> tuple[Status, ...]:
    """Whether each override could be installed with the others; never raises.

    Nothing is made or installed. An override is ``"broken"`` if another one claims one
    of its operators.
    """
    return states(overrides, _examine(overrides), "applicable")


def _examine(overrides: Sequence[OpOverride]) -> list[list[Any] | OpConflictError]:
    """The operators of each override, or why the override cannot be installed."""
    found: list[list[Any] | OpConflictError] = []
    first: dict[str, tuple[int, str]] = {}
    conflicts: dict[int, list[str]] = {}
    for index, override in enumerate(overrides):
        try:
            operators = [_resolve(override, target) for target in override.targets]
        except OpConflictError as error:
            found.append(error)
            continue
        found.append(operators)
        for target, operator in zip(override.targets, operators, strict=True):
            claim = index, target
            known, as_target = first.setdefault(_identity(operator), claim)
            if (known, as_target) == claim:
                continue
            other = overrides[known]
            text = (
                f"{target} is claimed by {override.owner!r} ({override.reason}) and, "
                f"as {as_target}, by {other.owner!r} ({other.reason})"
            )
            for one in {known, index}:
                conflicts.setdefault(one, []).append(text)
    for index, texts in conflicts.items():
        found[index] = OpConflictError(
            f"conflicting op overrides: {'; '.join(texts)}. Drop one of the claims; "
            "nothing was installed."
        )
    return found
