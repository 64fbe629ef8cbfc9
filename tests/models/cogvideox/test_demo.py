"""The checkpoint in the package shows what its prompt says."""

from __future__ import annotations

from pathlib import Path

from safetensors import safe_open

import tpuport
from training.demo.evaluate import asked, by_chance, right, shown
from training.demo.judge import judge
from training.demo.model import loaded
from training.demo.shapes import COLOURS, NEW_COLOURS

#: Trained by ``python -m training.demo.lora``.
OLIVE = Path(__file__).with_name("olive.safetensors")
WAYS = ("moves left", "moves right", "rises", "falls")


def test_the_demo_is_small_and_stored_in_float16(demo_folder: Path) -> None:
    files = [file for file in demo_folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    for file in demo_folder.rglob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            names = list(tensors.keys())
            kinds = {tensors.get_slice(name).get_dtype() for name in names}
        assert kinds == {"F16"}


def test_sixteen_held_out_captions_are_obeyed(demo_folder: Path) -> None:
    """Over 10 s: sixteen videos, by upstream's own code. docs/demo.md has more."""
    wanted, texts = asked(16)
    pipe = loaded(demo_folder)
    pipe.set_progress_bar_config(disable=True)
    seen = [judge(video) for video in shown(pipe, texts, steps=12)]
    colour, motion = right(wanted, seen)
    assert colour >= 0.9
    assert motion >= 0.85
    assert max(by_chance(wanted, seen)) <= 0.15


def test_a_lora_teaches_a_colour(demo_folder: Path) -> None:
    """Over 10 s: eight videos, four of them with the LoRA, and their programs."""
    palette = COLOURS | NEW_COLOURS
    texts = [f"a large olive square {to} on a black background" for to in WAYS]

    def olives(**how: object) -> int:
        with tpuport.ported(loaded(demo_folder), **how) as pipe:
            pipe.set_progress_bar_config(disable=True)
            seen = [judge(video, palette) for video in shown(pipe, texts, steps=12)]
        return sum(any(one.colour == "olive" for one in shapes) for shapes in seen)

    found = olives(lora=str(OLIVE))
    assert found >= 3
    assert found > olives()
