"""Scalars of a program that are not all known: expressions, and what they come to.

An expression is a nested tuple of an operation and its operands. The comparisons in it
that hold something unknown are its atoms: with an assumption for each the expression is
true or false.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: A number, a truth value, or a nested tuple of an operation and its operands where
#: something in it is not known.
Expression = Any

ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "sadd.s32": operator.add,
    "ssub.s32": operator.sub,
    "smul.u32": operator.mul,
    "smul.s32": operator.mul,
    "sand.u32": operator.and_,
    "sor.u32": operator.or_,
    "sxor.u32": operator.xor,
    "smin.s32": min,
    "smax.s32": max,
    "sshll.u32": lambda a, b: a << b,
    "sshra.s32": lambda a, b: a >> b,
    "sshrl.u32": lambda a, b: (a & 0xFFFFFFFF) >> b,
}
#: A comparison that is the opposite of one on the right.
_OPPOSITE = {"ne": "eq", "ge": "lt", "gt": "le"}


def wrap(value: int) -> int:
    """The low 32 bits as a signed number; truth values as they are."""
    if isinstance(value, bool):
        return value
    return (value + 2**31) % 2**32 - 2**31


def compare(kind: str, left: Expression, right: Expression) -> Expression:
    """``left`` beside ``right``; the kind is ``eq``, ``ne``, ``lt``, ``le``, ..."""
    if isinstance(left, int) and isinstance(right, int):
        return getattr(operator, kind)(left, right)
    if left == right:
        return kind in ("eq", "le", "ge")
    if kind in _OPPOSITE:
        return ("not", ("compare", _OPPOSITE[kind], left, right))
    return ("compare", kind, left, right)


def negate(value: Expression) -> Expression:
    if isinstance(value, bool):
        return not value
    if isinstance(value, tuple) and value[0] == "not":
        return value[1]
    return ("not", value)


def join(kind: str, values: list[Expression]) -> Expression:
    """``or`` or ``and`` of truth values."""
    decisive = kind == "or"
    if any(value is decisive for value in values):
        return decisive
    rest = [value for value in values if not isinstance(value, bool)]
    if not rest:
        return not decisive
    return rest[0] if len(rest) == 1 else (kind, *rest)


def select(
    holds: Expression, negated: bool, value: Expression, otherwise: Expression
) -> Expression:
    if isinstance(holds, bool):
        return value if holds != negated else otherwise
    return value if value == otherwise else ("select", holds, negated, value, otherwise)


def atoms(value: Expression) -> Iterator[Expression]:
    """The comparisons of unknown values that decide a condition."""
    if not isinstance(value, tuple):
        return
    if value[0] in ("not", "or", "and"):
        for part in value[1:]:
            yield from atoms(part)
    else:
        yield value


def decide(value: Expression, assumed: Mapping[Expression, bool]) -> bool | None:
    """The truth of a condition under assumptions on its atoms, or None."""
    if isinstance(value, bool):
        return value
    if not isinstance(value, tuple):
        return None
    if value[0] == "not":
        inner = decide(value[1], assumed)
        return None if inner is None else not inner
    if value[0] in ("or", "and"):
        decisive = value[0] == "or"
        parts = [decide(part, assumed) for part in value[1:]]
        if decisive in parts:
            return decisive
        return None if None in parts else not decisive
    return assumed.get(value)


def show(value: Expression) -> str:
    """An expression for people."""
    if not isinstance(value, tuple):
        return str(value)
    if value[0] == "compare":
        return f"{show(value[2])} {value[1]} {show(value[3])}"
    if value[0] in ("value", "text"):
        return str(value[1])
    return f"{value[0]}({', '.join(map(show, value[1:]))})"
