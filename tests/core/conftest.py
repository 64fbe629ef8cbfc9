"""Fixtures of the core tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.runs import SETTINGS
from tpuport.core.run_directory import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(
        tmp_path / "run",
        model="toy",
        variant="small",
        settings=SETTINGS,
        weights={"encoder": "aa" * 32, "vae": None},
    )
