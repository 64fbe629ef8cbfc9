"""A few cases of a sweep in the default run, all of them in `make test-all`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def swept(*values: Any) -> Any:
    """A set of arguments that the default run leaves out."""
    return pytest.param(*values, marks=pytest.mark.sweep)


def sweep(default: list[Any], every: Iterable[Any], *, single: bool = False) -> Any:
    """Every set of arguments; the default run has those of ``default``, in front.

    ``single``: each is one argument, whatever its type.
    """
    rest = list(every)
    for one in default:
        rest.remove(one)
    return [*default, *(swept(one) if single else swept(*one) for one in rest)]
