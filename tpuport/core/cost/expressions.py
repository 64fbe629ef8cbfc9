"""Scalars of a program that are not all known.

A value is a number or a truth value, or one of two kinds of unknowns: a text, which
names a number that only the data knows, or the set of comparisons of such numbers that
the value hangs on. A comparison is named by its text; who assumes one to hold puts the
text among what is known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping

Value = int | bool | str | frozenset[str]
Known = Mapping[str, int | bool]
"""What variables hold, and which comparisons do."""

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


def unknown(*values: Value) -> frozenset[str]:
    """The comparisons that values hang on; a number that stands for truth is one."""
    sets = (v if isinstance(v, frozenset) else {v} for v in values)
    return frozenset(one for each in sets for one in each if isinstance(one, str))


def compare(kind: str, left: Value, right: Value, known: Known) -> Value:
    """``left`` beside ``right``; the kind is ``eq``, ``ne``, ``lt``, ``le``, ..."""
    if isinstance(left, int) and isinstance(right, int):
        return bool(getattr(operator, kind)(left, right))
    if left == right:
        return kind in ("eq", "le", "ge")
    if isinstance(left, frozenset) or isinstance(right, frozenset):
        return frozenset[str]().union(
            *(side for side in (left, right) if isinstance(side, frozenset))
        )
    text = f"{left} {_OPPOSITE.get(kind, kind)} {right}"
    found: Value = known.get(text, frozenset((text,)))
    return negate(found) if kind in _OPPOSITE else found


def negate(value: Value) -> Value:
    return not value if isinstance(value, bool) else unknown(value)


def join(kind: str, values: list[Value]) -> Value:
    """``or`` or ``and`` of truth values."""
    decisive = kind == "or"
    if any(value is decisive for value in values):
        return decisive
    rest = [value for value in values if not isinstance(value, bool)]
    return unknown(*rest) if rest else not decisive


def select(holds: Value, negated: bool, value: Value, otherwise: Value) -> Value:
    if isinstance(holds, bool):
        return value if holds != negated else otherwise
    return value if value == otherwise else unknown(holds)
