"""What a traced program makes: for tests that look for arrays too large."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax.extend


def arrays_in(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The shape of every value a program makes, its inner programs included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield tuple(getattr(variable.aval, "shape", ()))
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from arrays_in(inner)


def squares(jaxpr: Any, size: int) -> list[tuple[int, ...]]:
    """The shapes with two dims of at least ``size``."""
    return [s for s in arrays_in(jaxpr) if sum(n >= size for n in s) >= 2]
