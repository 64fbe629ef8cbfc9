"""A checkpoint of configs, and what is said when one is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tpuport.core.plan.config_checkpoint import config_checkpoint
from tpuport.core.spec import demo_checkpoint as demo
from tpuport.plugins import get_port


def test_it_is_said_what_a_demo_is_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(write: Any, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model_index.json").write_text("{}")

    monkeypatch.setattr(demo, "_make", make)
    port = get_port("cogvideox")
    variant = port.variant("1.5-5b")
    said: list[str] = []
    with config_checkpoint(port, variant, tmp_path, said.append) as checkpoint:
        assert checkpoint.config("transformer")["num_layers"] == 42
    (line,) = said
    made, _, why = line.partition(", ")
    assert made.startswith(f"making the demo checkpoint of cogvideox in {tmp_path}")
    assert why == (
        "for its tokenizers and scheduler: they stand in for those of 1.5-5b, as no "
        "--weights are given"
    )
    # One that is asked for by itself is for itself.
    demo.demo_checkpoint(port, "demo-i2v", tmp_path, said.append)
    assert said[1].startswith("making the demo checkpoint of cogvideox in ")
    assert "," not in said[1].removeprefix(str(tmp_path))
