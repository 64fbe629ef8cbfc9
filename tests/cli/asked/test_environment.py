"""What a command sets before the libraries are imported."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import pytest

from tpuport.cli.asked import environment as _environment
from tpuport.cli.asked.environment import has_accelerator, prepare


@pytest.mark.parametrize("name", ["accel0", "vfio/3", "nvidia0"])
def test_accelerators_are_told_by_their_device_files(tmp_path: Path, name: str) -> None:
    assert not has_accelerator(tmp_path)
    (tmp_path / "vfio").mkdir()
    (tmp_path / "vfio" / "vfio").touch()
    assert not has_accelerator(tmp_path)
    (tmp_path / name).touch()
    assert has_accelerator(tmp_path)


@pytest.mark.parametrize(
    ("accelerator", "before", "after"),
    [(False, None, "cpu"), (True, None, None), (False, "tpu", "tpu"), (False, "", "")],
)
def test_the_cpu_is_chosen_only_where_there_is_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
    accelerator: bool,
    before: str | None,
    after: str | None,
) -> None:
    monkeypatch.setattr(_environment, "has_accelerator", lambda: accelerator)
    monkeypatch.delenv("JAX_PLATFORMS")
    if before is not None:
        monkeypatch.setenv("JAX_PLATFORMS", before)
    with warnings.catch_warnings():
        prepare()
    assert os.environ.get("JAX_PLATFORMS") == after


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSFORMERS_VERBOSITY", "info")
    logging.getLogger("jax").setLevel(logging.DEBUG)
    with warnings.catch_warnings():
        prepare()
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "info"
    assert logging.getLogger("jax").level == logging.DEBUG


def test_debug_leaves_the_libraries_talking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    prepare(debug=True)
    assert "TRANSFORMERS_VERBOSITY" not in os.environ
