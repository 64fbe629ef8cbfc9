"""The cache folder is known to be writable before the work."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.core.files.runs import NO_ROOM, failing
from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.errors import OutputError, UsageError


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
