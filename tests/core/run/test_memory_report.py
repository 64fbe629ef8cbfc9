"""Memory call by call: the backend's numbers, or the compiler's, and which of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tpuport
from tests.core.spec.toys import installed_toy
from tpuport.core.mesh.device_memory import plan_of
from tpuport.core.reports import memory_table
from tpuport.core.run.memory_report import MemoryLog

MIB = 2**20
SQUARE = 512 * 512 * 4


class Counted:
    """A device whose backend keeps count."""

    def __init__(self, number: int, in_use: int, peak: int | None) -> None:
        self.platform, self.id = "tpu", number
        self.stats = {"bytes_in_use": in_use}
        if peak is not None:
            self.stats["peak_bytes_in_use"] = peak

    def memory_stats(self) -> dict[str, int]:
        return self.stats


def product() -> Any:
    """``x`` [512, 512] becomes ``(x @ w) @ w`` in its own place."""
    x = jnp.ones((512, 512))
    lowered = jax.jit(lambda w, x: (x @ w) @ w, donate_argnums=1).lower(x, x)
    return lowered.compile()


def test_what_the_backend_counts_is_told_as_it_is() -> None:
    devices = [Counted(0, 3 * MIB, 5 * MIB), Counted(1, 2 * MIB, 7 * MIB)]
    log = MemoryLog(devices)
    log.begins("a run", "denoise", "step")
    log.ended("denoise", 0, "step", product())
    devices[1].stats["bytes_in_use"] = 4 * MIB
    log.ended("denoise", 1, "step", product())
    first, second = log.calls("denoise")
    assert first["source"] == second["source"] == "live"
    assert first["parts"] == {}
    assert first["devices"] == (
        {"device": "tpu:0", "in_use": 3 * MIB, "peak": 5 * MIB},
        {"device": "tpu:1", "in_use": 2 * MIB, "peak": 7 * MIB},
    )
    assert second["devices"][1]["in_use"] == 4 * MIB


def test_without_a_count_the_plan_of_the_program_stands_in() -> None:
    log = MemoryLog(jax.devices()[:1])
    log.begins("a run", "denoise", "step")
    log.ended("denoise", 4, "step", product())
    (call,) = log.calls("denoise")
    assert call["source"] == "planned"
    assert call["parts"]["arguments"] == 2 * SQUARE
    assert call["parts"]["outputs"] == call["parts"]["shared"] == SQUARE
    assert call["parts"]["temporaries"] >= SQUARE
    (device,) = call["devices"]
    assert device["device"] == "cpu:0"
    # The weights and the carry stay; between the products there is one more square.
    assert device["in_use"] == 2 * SQUARE + call["parts"]["code"]
    assert device["peak"] == device["in_use"] + call["parts"]["temporaries"]


def test_what_has_no_plan_is_unknown() -> None:
    log = MemoryLog(jax.devices()[:1])
    log.begins("a run", "decode", "chunk")
    log.ended("decode", 0, "next", lambda *args: None)
    (call,) = log.calls("decode")
    assert (call["source"], call["devices"], call["parts"]) == ("unknown", (), {})
    assert plan_of(None) == {}
    assert memory_table([("decode", "chunk", [call])])[1][-1] == "unknown"


def test_calls_that_are_alike_make_one_line_of_their_fullest_device() -> None:
    devices = [Counted(n, 2 * MIB, 3 * 2**30) for n in range(4)]
    log = MemoryLog(devices)
    log.begins("a run", "denoise", "step")
    for call in range(5):
        if call == 3:
            devices[2].stats["bytes_in_use"] = 9 * MIB
        log.ended("denoise", call, "step", product())
    one = "tpu:2, fullest of 4"
    assert memory_table([("denoise", "step", log.calls("denoise"))])[1:] == [
        ("denoise", "step 1-3", "step", "4 x tpu", "2.0 MiB", "3.00 GiB", "live"),
        ("denoise", "step 4-5", "step", one, "9.0 MiB", "3.00 GiB", "live"),
    ]


def reports(cache: Path, **options: Any) -> dict[str, Any]:
    with (
        installed_toy(),
        tpuport.load("toy", cache_dir=cache, keep_loaded=False, **options) as session,
    ):
        report = session.generate("a cat").report
        assert report.as_dict()["stages"][1]["memory"] == report.stages[1].memory
        return {stage.stage: stage for stage in report.stages}


@pytest.mark.parametrize("mesh", [None, "dp=1,sp=1,tp=2"])
def test_a_session_tells_it_for_every_call(mesh: str | None, tmp_path: Path) -> None:
    made = reports(tmp_path, memory_report=True, mesh=mesh)
    assert [len(made[n].memory) for n in ("encode", "denoise", "decode")] == [1, 3, 1]
    names = ["cpu:0", "cpu:1"] if mesh else ["cpu:0"]
    for call in made["denoise"].memory:
        assert call["source"] == "planned"
        assert [device["device"] for device in call["devices"]] == names
    assert [d["device"] for d in made["decode"].memory[0]["devices"]] == names
    # The same from executables that another process left.
    again = reports(tmp_path, memory_report=True, mesh=mesh)
    assert all(c.loaded for stage in again.values() for c in stage.compiles)
    for name, stage in made.items():
        assert again[name].memory == stage.memory
        assert stage.memory[0]["devices"][0]["in_use"] > 0


def test_an_error_tells_what_was_gathered_until_then(tmp_path: Path) -> None:
    def full(first: int, frames: Any) -> None:
        raise OSError("disk full")

    def notes(**options: Any) -> list[str]:
        with pytest.raises(OSError, match="disk full") as caught:
            session.generate("a cat", on_frames=full, **options)
        return [n for n in getattr(caught.value, "__notes__", []) if "memory" in n]

    with (
        installed_toy(),
        tpuport.load("toy", cache_dir=tmp_path, memory_report=True) as session,
    ):
        (note,) = notes()
        lines = note.splitlines()
        assert lines[0] == "memory until then:"
        # The stages that ended well, and the one that did not.
        names = [line.split()[0] for line in lines[2:-1]]
        assert names == ["encode", "denoise", "decode"]
        assert "step 1-3" in note
        assert lines[-1].lstrip().startswith("planned: ")
        # The same run again tells of itself, and a good one leaves nothing behind.
        assert notes() == [note]
        session.generate("a cat")
        assert session.executor._memory.text() == ""
    with installed_toy(), tpuport.load("toy", cache_dir=tmp_path) as session:
        assert notes() == []


def test_a_run_forgets_what_is_not_of_it() -> None:
    call = None
    log = MemoryLog(jax.devices()[:1])
    stages = ("encode", "denoise", "decode")

    def told() -> list[str]:
        return [stage for stage in stages if stage in log.text()]

    for stage in stages:
        log.begins("a run", stage, "step")
        log.ended(stage, 0, "program", call)
    assert told() == [*stages]
    log.begins("a run", "denoise", "step")
    assert told() == ["encode"]
    log.ended("denoise", 0, "program", call)
    assert told() == ["encode", "denoise"]
    log.begins("another run", "decode", "step")
    assert log.text() == ""


def test_nothing_is_told_that_was_not_asked_for(tmp_path: Path) -> None:
    assert all(stage.memory == () for stage in reports(tmp_path).values())
