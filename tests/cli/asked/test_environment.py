"""What a command sets before the libraries are imported."""

from __future__ import annotations

import logging
import os
import tempfile
import warnings
from pathlib import Path

import pytest

from tests.core.files.runs import NO_ROOM, failing
from tpuport.cli.asked import environment as _environment
from tpuport.cli.asked.environment import cache_folder, has_accelerator, prepare
from tpuport.errors import OutputError, UsageError


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


# --- the cache folder


def test_what_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="choose another with --cache-dir") as caught:
        cache_folder(tmp_path / "file")
    assert caught.value.exit_code == 2
    monkeypatch.setattr(tempfile, "TemporaryFile", failing)
    with pytest.raises(OutputError, match=f"{tmp_path}: {NO_ROOM}") as caught:
        cache_folder(tmp_path)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("name", ["compiled", "demo", "runs", "kernels", "schedules"])
def test_a_file_in_the_place_of_a_folder_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(
        UsageError, match=f"{name} is not a folder; move it away, or name another place"
    ):
        cache_folder(tmp_path)
