"""The demo checkpoint: made where there is none, and made again where it is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import SafetensorError

from tpuport.core.spec.demo_checkpoint import demo_checkpoint
from tpuport.errors import WeightsError


@pytest.fixture
def port() -> Any:
    def make(folder: Path, variant: str) -> None:
        (folder / "model_index.json").write_text("{}")

    return SimpleNamespace(name="toy", demo_version=1, make_demo=make)


@pytest.mark.parametrize("seal", ["[]", "3", '{"fingerprint": 1}', "[" * 10**5, None])
def test_a_damaged_seal_means_another_demo(
    port: Any, tmp_path: Path, seal: Any
) -> None:
    made = demo_checkpoint(port, "small", tmp_path)
    said: list[str] = []
    demo_checkpoint(port, "small", tmp_path, said.append)
    assert said == []
    file = made.folder / "tpuport-demo.json"
    whole = file.read_text()
    file.unlink() if seal is None else file.write_text(seal)
    demo_checkpoint(port, "small", tmp_path, said.append)
    assert len(said) == 1
    assert json.loads(file.read_text()) == json.loads(whole)


@pytest.mark.parametrize("in_the_way", ["demo", "demo/toy-small-1"])
def test_a_file_where_a_folder_should_be_is_named(
    port: Any, tmp_path: Path, in_the_way: str
) -> None:
    file = tmp_path / in_the_way
    file.parent.mkdir(exist_ok=True)
    file.touch()
    with pytest.raises(WeightsError, match="cannot be written: ") as caught:
        demo_checkpoint(port, "small", tmp_path)
    assert str(file) in str(caught.value)
    assert "--cache-dir names another folder" in str(caught.value)


def test_a_full_disk_is_one_line_with_the_folder(port: Any, tmp_path: Path) -> None:
    def full(folder: Path, variant: str) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    port.make_demo = full
    with pytest.raises(WeightsError) as caught:
        demo_checkpoint(port, "small", tmp_path)
    assert str(tmp_path / "demo/toy-small-1") in str(caught.value)
    assert "no room is left on the disk" in str(caught.value)
    assert list((tmp_path / "demo").iterdir()) == []
