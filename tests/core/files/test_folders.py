"""A folder that is made once: made where there is none, and again where damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from tpuport.core.files.folders import made_once
from tpuport.errors import WeightsError


def make(folder: Path) -> None:
    (folder / "model_index.json").write_text("{}")


@pytest.mark.parametrize("seal", ["[]", "3", '{"fingerprint": 1}', "[" * 10**5, None])
def test_a_damaged_seal_means_another_folder(tmp_path: Path, seal: Any) -> None:
    folder = tmp_path / "demo/toy-small"
    said: list[str] = []
    for _ in range(2):
        made_once(folder, make, "making a toy", said.append)
    assert said == ["making a toy"]
    file = folder / "tpuport-demo.json"
    whole = file.read_text()
    file.unlink() if seal is None else file.write_text(seal)
    made_once(folder, make, "making a toy", said.append)
    assert len(said) == 2
    assert json.loads(file.read_text()) == json.loads(whole)


def test_a_damaged_file_means_another_folder(tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    made_once(folder, make, "", lambda text: None)
    (folder / "model_index.json").write_text("[]")
    made_once(folder, make, "", lambda text: None)
    assert (folder / "model_index.json").read_text() == "{}"


@pytest.mark.parametrize("in_the_way", ["demo", "demo/toy-small"])
def test_a_file_where_a_folder_should_be_is_named(
    tmp_path: Path, in_the_way: str
) -> None:
    file = tmp_path / in_the_way
    file.parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(WeightsError, match="cannot be written: ") as caught:
        made_once(tmp_path / "demo/toy-small", make, "", lambda text: None)
    assert str(file) in str(caught.value)
    assert "--cache-dir names another folder" in str(caught.value)


@pytest.mark.parametrize("kind", [SafetensorError, Exception])
def test_a_full_disk_is_one_line_with_the_folder(
    tmp_path: Path, kind: type[Exception]
) -> None:
    """The error is of safetensors, or of tokenizers."""

    def full(folder: Path) -> None:
        raise kind("I/O error: No space left on device (os error 28)")

    with pytest.raises(WeightsError) as caught:
        made_once(tmp_path / "demo/toy", full, "", lambda text: None)
    assert str(tmp_path / "demo/toy") in str(caught.value)
    assert "no room is left on the disk" in str(caught.value)
    assert list((tmp_path / "demo").iterdir()) == []


def test_another_error_is_handed_on(tmp_path: Path) -> None:
    def wrong(folder: Path) -> None:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        made_once(tmp_path / "toy", wrong, "", lambda text: None)
    assert list(tmp_path.iterdir()) == []
