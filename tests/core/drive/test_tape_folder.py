"""A tape on disk is whole, or is refused by name; the disk may be full."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.core.heard import Heard
from tpuport.core.drive import tape_folder
from tpuport.core.drive.checkpoints import THREAD, Checkpoints
from tpuport.core.drive.kept_values import kept, shape_of
from tpuport.core.drive.tape import Call, Recorded, Step, Tape
from tpuport.core.drive.tape_folder import TapeFolder
from tpuport.core.enums import StageName
from tpuport.core.files.run_record import CheckpointEvery
from tpuport.errors import ArtifactError, StoreError, UsageError, WriteError


def recorded(steps: int, finished: StageName | None = None) -> Recorded:
    """A tape of so many steps."""
    text = Call("text_encoder", kept((torch.ones(2), 0.5)), 0, None)
    denoise = Call("transformer", shape_of((torch.ones(1, 4),)), 0, None)
    random = kept([torch.arange(4, dtype=torch.uint8)])
    last = Step(0, steps - 1, kept(torch.full((1, 4), steps)), kept([{}]), random)
    calls = (text, *[denoise] * steps)
    return Recorded(calls, (last,) * bool(steps), steps, finished)


def results(found: Recorded) -> list[float]:
    return [float(step.result.value()[0, 0]) for step in found.steps]


def test_a_tape_takes_the_place_of_the_one_before(tmp_path: Path) -> None:
    folder = TapeFolder(tmp_path / "tape")
    assert folder.read() == Recorded()
    for steps in (0, 1, 5):
        folder.write(recorded(steps))
        found = TapeFolder(folder.path).read()
        assert (found.stepped, len(found.calls)) == (steps, steps + 1)
        assert results(found) == [steps] * bool(steps)
    files = {path.name for path in folder.path.iterdir()}
    assert files == {"tape.json", "calls-00000.safetensors", "steps-00005.safetensors"}
    # Another process goes on, and writes no call twice.
    again = TapeFolder(folder.path)
    again.read()
    again.write(recorded(6, StageName.DENOISE))
    found = TapeFolder(folder.path)
    assert results(found.read()) == [6.0]
    assert found.read().finished == StageName.DENOISE


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def alter(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))


def alter_record(file: Path) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), "stepped": 1}))


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("steps-00002.safetensors", cut, "is torn"),
        ("steps-00002.safetensors", alter, "was altered"),
        ("calls-00000.safetensors", Path.unlink, "is missing"),
        ("tape.json", cut, "is not JSON"),
        ("tape.json", alter_record, "was altered"),
        ("tape.json", lambda f: f.write_text("{}"), "schema"),
    ],
)
def test_a_damaged_tape_is_refused_by_name(
    tmp_path: Path, name: str, damage: Callable[[Path], object], told: str
) -> None:
    TapeFolder(tmp_path).write(recorded(2))
    damage(tmp_path / name)
    with pytest.raises(ArtifactError, match=told) as raised:
        TapeFolder(tmp_path).read()
    assert name in str(raised.value)


def test_within_a_stage_the_mesh_stays(tmp_path: Path) -> None:
    folder = TapeFolder(tmp_path)
    folder.begin({"mesh": "sp=2"}, Recorded())
    folder.write(recorded(0, StageName.ENCODE))
    folder.begin({"mesh": "sp=4"}, folder.read())
    folder.write(recorded(2, StageName.ENCODE))
    with pytest.raises(ArtifactError, match="was made with mesh sp=4, now sp=2"):
        folder.begin({"mesh": "sp=2"}, folder.read())
    folder.write(recorded(2, StageName.DENOISE))
    folder.begin({"mesh": "sp=2"}, folder.read())


def take(tape: Tape, steps: int) -> None:
    """Let a tape record so many steps."""
    tape.recorded = recorded(steps)
    tape.on_recorded()


def settle() -> None:
    """Wait for what is written beside the run."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join()


def test_checkpoints_are_written_as_often_as_asked(tmp_path: Path) -> None:
    tape, folder = Tape(), TapeFolder(tmp_path)
    with Checkpoints(tape, folder, CheckpointEvery(steps=2), Heard()):
        found = []
        for steps in (1, 2, 3, 4, 5):
            take(tape, steps)
            settle()
            found.append(TapeFolder(tmp_path).read().stepped)
        assert found == [0, 2, 2, 4, 4]
    # What ends the run also keeps it.
    assert TapeFolder(tmp_path).read().stepped == 5


def test_time_makes_a_checkpoint_due() -> None:
    every = CheckpointEvery.parse("2m")
    assert not every.due(100, 119.0)
    assert every.due(1, 120.0)
    assert str(CheckpointEvery.parse("60s")) == "60s"
    assert CheckpointEvery.parse(5).due(5, 0.0)


@pytest.mark.parametrize("text", ["", "0", "x", "-1", "1.5", "5h", "0s"])
def test_an_interval_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="60s or 2m"):
        CheckpointEvery.parse(text)


def test_a_checkpoint_is_put_elsewhere_beside_the_steps(tmp_path: Path) -> None:
    """No step waits. The last one is put where a run breaks, and not where it ends."""
    put, going, said = list[int](), threading.Event(), Heard()

    def elsewhere() -> None:
        put.append(TapeFolder(tmp_path).read().stepped)
        assert going.wait(60)

    tape, folder = Tape(), TapeFolder(tmp_path)
    given = (tape, folder, CheckpointEvery(steps=1), said, elsewhere)
    with Checkpoints(*given):
        for steps in (1, 2, 3):
            take(tape, steps)  # the first one is still on its way
        going.set()
        settle()
    assert (put, TapeFolder(tmp_path).read().stepped) == ([1], 3)

    def breaks() -> None:
        elsewhere()
        raise StoreError("the store is gone")

    given = (tape, folder, CheckpointEvery(steps=100), said, breaks)
    checkpoints, error = Checkpoints(*given), KeyboardInterrupt()
    with checkpoints:
        take(tape, 5)
        checkpoints.__exit__(type(error), error, None)
    assert put == [1, 5]
    assert error.__notes__ == ["no checkpoint: the store is gone"]


def test_a_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint before stays; a stage that cannot be kept is an error."""
    tape, folder, said = Tape(), TapeFolder(tmp_path), Heard()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with Checkpoints(tape, folder, CheckpointEvery(steps=1), said) as checkpoints:
        take(tape, 1)
        settle()
        with monkeypatch.context() as patched:
            patched.setattr(tape_folder, "replacing", full)
            for steps in (2, 3, 4):
                take(tape, steps)
                settle()
            assert TapeFolder(tmp_path).read().stepped == 1
            with pytest.raises(WriteError, match="no room is left"):
                checkpoints.finish()
        (line,) = said.lines
        assert "no checkpoint" in line
        assert "the run goes on without" in line
    assert TapeFolder(tmp_path).read().stepped == 4
    # What did not fit is gone.
    assert len(list(tmp_path.glob("steps-*"))) == 1
