"""``make faults`` counts what does not hold, and tries each kind of fault."""

from __future__ import annotations

import functools
import importlib
import os
import random
from pathlib import Path

import pytest

from tests.cli.tools import Ran
from tests.measure import faults, places, wrong_files
from tests.measure.faults import KINDS, Outcome, drawn, main
from tests.measure.places import of_end, of_leftovers, of_named, of_pair
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.sealed_json import sidecar_bytes, sidecar_path

REFUSED = Ran(1, "", "encode ...\nerror: run: is damaged; make it again\n")


@pytest.mark.parametrize("ran", [Ran(0, "", "wrote fox.gif\n"), REFUSED])
def test_a_good_end_holds(ran: Ran) -> None:
    assert of_end(ran) == []


@pytest.mark.parametrize(
    "ran",
    [
        Ran(139, "", ""),
        Ran(1, "", ""),
        Ran(0, "", "error: run: is damaged\n"),
        Ran(1, "", "error: run: is damaged\nerror: twice\n"),
        Ran(1, "", "error: unexpected KeyError: 'x'; run again with --debug\n"),
        Ran(0, "", "Exception ignored in: <x>\nwrote fox.gif\n"),
        Ran(1, "", 'Traceback (most recent call last):\n  File "x"\nerror: x\n'),
        Ran(1, "", f"error: {'x ' * 200}\n"),
    ],
)
def test_a_bad_end_does_not_hold(ran: Ran) -> None:
    assert of_end(ran) != []


def test_an_error_names_what_is_at_fault() -> None:
    assert of_named(REFUSED, "vae", "run") == []
    assert of_named(REFUSED, "vae") != []


def test_what_is_left_or_half_written_does_not_hold(tmp_path: Path) -> None:
    video = tmp_path / "fox.gif"
    assert of_leftovers(tmp_path) == of_pair(video) == []
    video.write_bytes(b"a video")
    assert of_pair(video, alone=True) == []
    assert of_pair(video) != []
    output = {"file": "fox.gif", "sha256": hash_output(video)[0], "bytes": 7}
    sidecar_path(video).write_bytes(sidecar_bytes({"output": output}))
    assert of_pair(video) == []
    video.write_bytes(b"another")
    assert of_pair(video) != []
    video.unlink()
    assert of_pair(video) != []
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".tpuport-host-1-2-3.gif").touch()
    assert of_leftovers(tmp_path) != []


def test_a_trial_tells_what_a_command_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that fails without a word and leaves half of a file."""

    def worst(*args: str) -> Ran:
        Path(".tpuport-x").touch()
        return Ran(1, "", "")

    place = places.Place(tmp_path / "base", tmp_path / "trial")
    place.folder.mkdir()
    (place.base / "denoised").mkdir(parents=True)
    (place.base / "denoised" / "run.json").write_text("{}")
    monkeypatch.setattr(places, "call", worst)
    trial = wrong_files.run_folder(place, random.Random(0))
    assert trial.showed == "refused"
    assert "exit code 1 with 0 lines of error" in trial.wrong
    assert f"{place.folder / '.tpuport-x'} is left" in trial.wrong


def test_each_kind_has_its_trial_and_is_drawn() -> None:
    assert set(KINDS) == {"kills", "damaged files", "bad checkpoints", "full disks"}
    for path, _ in KINDS.values():
        module, name = path.split(":")
        assert callable(getattr(importlib.import_module(module), name))
    assert {drawn(0, number)[0] for number in range(40)} == set(KINDS)
    assert drawn(5, 3)[1].random() == drawn(5, 3)[1].random()
    assert drawn(5, 3, "kills")[1].random() == drawn(5, 3)[1].random()


def test_a_death_is_an_answer_and_the_next_trial_is_made() -> None:
    worker = faults.Worker()
    try:
        assert "died with code 3" in str(
            worker.call(functools.partial(os._exit, 3), 60)
        )
        assert worker.call(functools.partial(str, 5), 60) == "5"
    finally:
        worker.close()


@pytest.mark.parametrize(("wrong", "code"), [([], 0), (["a traceback"], 1)])
def test_a_fault_is_told_with_what_repeats_it(
    wrong: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = Outcome(7, "kills", "generate", "code 143", wrong)
    monkeypatch.setattr(faults, "trials", lambda *args: iter([found]))
    assert main(["--seed", "12"]) == code
    out = capsys.readouterr().out
    assert out.startswith("seed 12\n7 kills: generate: code 143, ")
    assert ("--seed 12 --trial 7" in out) == bool(code)
