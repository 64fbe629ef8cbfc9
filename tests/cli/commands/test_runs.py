"""``tpuport runs``: what kills leave, listed and removed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.cli.tools import ASKED, Cli, Made
from tests.measure.damage import reseal
from tests.measure.kills import kill
from tpuport.cli.asked.settings import Settings
from tpuport.cli.commands.runs import FORGOTTEN
from tpuport.cli.runs.kept_runs import (
    going_on,
    keep_asked,
    kept_run,
    out_of,
    sweep,
    temporary,
)
from tpuport.core.files.run_lock import LOCK_FILE, working_in
from tpuport.core.files.run_record import RUN_FILE, TAPE_FILE
from tpuport.errors import ArtifactError, VideoError


@pytest.fixture
def kept(made: Made, tmp_path: Path) -> Path:
    """A cache with runs: one that can go on, one that cannot, one that is begun."""
    runs = tmp_path / "cache" / "runs"
    shutil.copytree(made.folder / "run", runs / "good")
    (runs / "good" / LOCK_FILE).write_text("1")
    keep_asked(runs / "good", Settings(), "fox.gif")
    (runs / "dead").mkdir()
    (runs / "dead" / LOCK_FILE).write_text("1")
    (runs / "begun").mkdir()
    return tmp_path / "cache"


def names(cache: Path) -> set[str]:
    return {path.name for path in (cache / "runs").iterdir()}


def test_what_dead_processes_left_is_swept(kept: Path) -> None:
    shutil.copytree(kept / "runs" / "dead", kept / "runs" / "alive")
    (kept / "runs" / "alive" / RUN_FILE).touch()
    with working_in(kept / "runs" / "alive"):
        sweep(kept)
        assert names(kept) == {"good", "begun", "alive"}


def test_a_run_stays_only_after_an_error_that_it_can_go_on_from(kept: Path) -> None:
    good, dead = kept / "runs" / "good", kept / "runs" / "dead"
    for folder in (good, dead):
        with pytest.raises(KeyError), temporary(folder):
            raise KeyError
    assert names(kept) == {"good", "begun"}
    with temporary(good):
        pass
    assert names(kept) == {"begun"}


def test_the_place_of_the_videos_is_kept(kept: Path) -> None:
    good = kept / "runs" / "good"
    keep_asked(good, Settings(report=Path("r.json"), overwrite=True), "frames/")
    found = out_of(kept_run(kept, "good"), Settings())
    assert found.out == f"{Path('frames').absolute()}/"
    assert (found.overwrite, found.report) == (True, Path("r.json").absolute())
    assert out_of(kept_run(kept, "good"), Settings(out="v.gif")).out == "v.gif"


@pytest.mark.parametrize(("field", "value"), [("out", 3), ("report", [])])
def test_an_altered_wish_is_named_by_its_field(
    kept: Path, field: str, value: object
) -> None:
    run = kept_run(kept, "good")
    file = run.folder / "asked.json"
    reseal(file, {**json.loads(file.read_text()), field: value})
    with pytest.raises(ArtifactError, match=f"has no usable {field}") as caught:
        out_of(run, Settings())
    assert str(caught.value).startswith(f"{file}: ")
    assert not run.resumable  # nor does the list say so


def test_runs_are_listed_with_what_is_kept(
    cli: Cli, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # a run that is minutes old has a longer row
    assert cli("runs", "--cache-dir", kept / "none").out == "no run is kept\n"
    listed = {
        r["id"]: r for r in cli("runs", "--cache-dir", kept, "--json").json["runs"]
    }
    assert set(listed) == names(kept)
    good = listed["good"]
    assert (good["model"], good["prompts"]) == ("WanPipeline", ["a fox runs", "a cat"])
    assert (good["finished"], good["resumable"]) == (["step 2", "step 2"], True)
    files = (kept / "runs" / "good").rglob("*")
    assert good["bytes"] == sum(f.stat().st_size for f in files if f.is_file())
    assert not listed["dead"]["resumable"]
    with working_in(kept / "runs" / "good"):
        text = cli("runs", "--cache-dir", kept).out
    (row,) = (line for line in text.splitlines() if line.startswith("good"))
    assert "step 2 step 2" in row
    assert f"in process {os.getpid()}" in row
    assert row.endswith("a fox runs")


def test_a_line_of_the_list_fits_the_terminal(
    cli: Cli, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kept / "runs" / "good" / RUN_FILE
    run = json.loads(file.read_text())
    run["asked"]["prompt"] = ["a fox in the snow " * 20]
    reseal(file, run)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert max(map(len, _listed(cli, kept))) == 100
    monkeypatch.setenv("COLUMNS", "120")
    (row,) = (line for line in _listed(cli, kept) if line.startswith("good"))
    assert len(row) == 120
    assert row.endswith("...")


def test_clean_removes_what_cannot_go_on_or_is_forgotten(cli: Cli, kept: Path) -> None:
    cache = ("--cache-dir", kept)
    assert cli("runs", "clean", *cache, "--json").json["removed"] == ["dead", "begun"]
    old = time.time() - FORGOTTEN * 86400 - 60
    assert "0 runs removed" in cli("runs", "clean", *cache).out
    for file in (RUN_FILE, f"video-0/{TAPE_FILE}", f"video-1/{TAPE_FILE}"):
        os.utime(kept / "runs" / "good" / file, (old, old))
    with working_in(kept / "runs" / "good"):
        assert "0 runs removed" in cli("runs", "clean", "--all", *cache).out
        cli.refused(f"process {os.getpid()}", "runs", "clean", "good", *cache, code=1)
    assert "1 run removed" in cli("runs", "clean", *cache).out
    assert names(kept) == set()


def test_clean_removes_what_is_named_or_all(cli: Cli, kept: Path) -> None:
    cache = ("--cache-dir", kept)
    assert "removed good" in cli("runs", "clean", "good", *cache).out
    cli.refused("no run 'good' is kept", "runs", "clean", "good", *cache)
    assert cli("runs", "clean", "dead", "--all", *cache).code == 2
    assert cli("runs", *cache, "clean").code == 2
    assert "2 runs removed" in cli("runs", "clean", "--all", *cache).out


def test_a_run_that_would_fail_again_says_why_and_is_cleaned(
    cli: Cli, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    good = kept / "runs" / "good"
    wrong = VideoError("denoise: the latents are NaN; " + "and so on " * 20)
    with pytest.raises(VideoError) as caught, going_on(good):
        raise wrong
    assert "Go on with" not in "".join(caught.value.__notes__)
    (why,) = (line for line in _listed(cli, kept) if "failed: " in line)
    assert why.startswith("  failed: denoise: the latents are NaN; and")
    assert len(why) == 100
    assert kept_run(kept, "good").failed == str(wrong).strip()

    # What can pass replaces what the earlier try said.
    with pytest.raises(KeyboardInterrupt) as ended, going_on(good):
        raise KeyboardInterrupt
    assert "Go on with" in ended.value.__notes__[0]
    assert any("can go on" in line for line in _listed(cli, kept))
    with pytest.raises(VideoError), going_on(good):
        raise VideoError("NaN")
    cli("runs", "clean", "--cache-dir", kept)
    assert names(kept) == set()


def test_clean_removes_a_run_whose_lock_became_a_folder(cli: Cli, kept: Path) -> None:
    lock = kept / "runs" / "good" / LOCK_FILE
    lock.unlink(missing_ok=True)
    (lock / "inside").mkdir(parents=True)
    cli.good("runs", "clean", "--all", "--cache-dir", kept)
    assert not lock.parent.exists()


def _listed(cli: Cli, cache: Path) -> list[str]:
    return cli("runs", "--cache-dir", cache).out.splitlines()


def test_ctrl_c_while_libraries_are_imported_leaves_nothing(
    folder: Path, tmp_path: Path
) -> None:
    """A real process, which imports torch and jax: some seconds."""
    asked = ("generate", "--weights", str(folder), *ASKED, "--out", "fox.gif")
    killed = kill(
        asked,
        tmp_path,
        signal.SIGINT,
        ready=lambda said: "importing" in said,
        after=0.3,
    )
    assert (killed.code, killed.sent) == (130, True), killed.err
    assert "interrupted" in killed.err.splitlines()[-1]
    assert "Traceback" not in killed.err
    assert not (tmp_path / "fox.gif").exists()
    assert not list((tmp_path / "cache").rglob("runs/*"))
