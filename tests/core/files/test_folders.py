"""Folders to write to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpuport.core.files.folders import check_folder, check_own_folder
from tpuport.errors import UsageError


def test_a_folder_to_write_to_is_looked_at_and_not_made(tmp_path: Path) -> None:
    (tmp_path / "fox.gif").touch()
    with pytest.raises(UsageError, match=r"--out .*fox\.gif is not a folder"):
        check_folder("--out", tmp_path / "fox.gif")
    with pytest.raises(UsageError, match=r"fox\.gif is not a folder"):
        check_folder("--out", tmp_path / "fox.gif" / "built")
    check_folder("--out", tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_a_folder_with_files_of_others_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    check_own_folder("--out", tmp_path, lambda path: path.name == "mine", "is none")
    with pytest.raises(UsageError, match="holds mine, which is none; name another"):
        check_own_folder("--out", tmp_path, lambda path: False, "is none")
