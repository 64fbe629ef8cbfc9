"""Fixtures of the core tests."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from tests.core.tracing.upstream import UPSTREAM


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fresh upstream module ``up``, and a check that every test leaves it whole."""
    module = types.ModuleType("up")
    exec(UPSTREAM, vars(module))
    module.Block.__module__ = module.Base.__module__ = "up"
    monkeypatch.setitem(sys.modules, "up", module)
    owners = (module, module.Base, module.Block, module.Block.Inner)
    before = [dict(vars(owner)) for owner in owners]
    yield module
    assert [dict(vars(owner)) for owner in owners] == before
