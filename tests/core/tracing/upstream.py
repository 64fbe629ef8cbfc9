"""A made-up upstream module, as source, and patches on it."""

from __future__ import annotations

from typing import Any

import pytest

from tpuport.core.tracing.patching import Patch, applied
from tpuport.errors import PatchError

UPSTREAM = """
from functools import cached_property

ready = True

def double(x):
    return 2 * x

def triple(x):
    return 3 * x

class Base:
    def inherited(self):
        return "base"

class Block(Base):
    LIMIT = 3

    def method(self, x):
        return ("method", x)

    @staticmethod
    def static(x):
        return ("static", x)

    @classmethod
    def named(cls, x):
        return (cls.__name__, x)

    @property
    def size(self):
        return 1

    @cached_property
    def table(self):
        return 1

    class Inner:
        def deep(self):
            return "deep"

Alias = Block

def __getattr__(name):
    if name == "late":
        return len
    if name == "late_and_broken":
        raise RuntimeError("no such backend")
    raise AttributeError(f"module 'up' has no attribute {name!r}")
"""


def patch(target: str, replacement: Any = lambda *a: "new", **more: Any) -> Patch:
    given = {"name": "p", "reason": "why", "upstream": "", **more}
    return Patch(target=target, replacement=replacement, **given)


def refused(*patches: Patch) -> str:
    """The message of the error on entering; the block must not run."""
    with pytest.raises(PatchError) as caught, applied(patches):
        raise AssertionError("the block ran")
    return str(caught.value)
