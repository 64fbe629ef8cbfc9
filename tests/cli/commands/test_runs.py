"""``tpuport runs``, and what kills leave."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.cli.tools import SMALL, Cli, Made
from tests.core.files.videos import read_back
from tests.measure.damage import reseal
from tests.measure.kills import kill
from tpuport.cli.asked.settings import Settings
from tpuport.cli.commands.runs import FORGOTTEN
from tpuport.cli.runs.kept_runs import (
    asked_for,
    going_on,
    keep_asked,
    kept_run,
    new_run,
    temporary,
)
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.files.run_lock import LOCK_FILE, working_in
from tpuport.core.files.run_record import RUN_FILE
from tpuport.core.spec.run_settings import RunSettings
from tpuport.errors import ArtifactError, VideoError


@pytest.fixture
def kept(made: Made, tmp_path: Path) -> Path:
    """A cache with runs: one that can go on, one that cannot, one that is begun."""
    runs = tmp_path / "cache" / "runs"
    shutil.copytree(made.run, runs / "good")
    (runs / "good" / LOCK_FILE).write_text("1")
    keep_asked(runs / "good", Settings(), "fox.gif")
    (runs / "dead").mkdir()
    (runs / "dead" / LOCK_FILE).write_text("1")
    (runs / "begun").mkdir()
    return tmp_path / "cache"


def names(cache: Path) -> set[str]:
    return {path.name for path in (cache / "runs").iterdir()}


def test_a_new_run_removes_what_dead_processes_left(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nor does it read through the tensors of others.
    monkeypatch.setattr(RunDirectory, "finished", None)
    shutil.copytree(kept / "runs" / "dead", kept / "runs" / "alive")
    (kept / "runs" / "alive" / RUN_FILE).touch()
    with working_in(kept / "runs" / "alive"), new_run(kept) as folder:
        assert names(kept) == {"good", "begun", "alive", folder.name}
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


def test_the_settings_of_a_run_are_kept(kept: Path) -> None:
    how = RunSettings.read(
        {
            "attention": "blockwise:block_q=128",
            "mesh": "dp=2",
            "dtype": "bfloat16",
            "vae_tiling": "on",
            "vae": "flax",
            "blocks": "upstream",
            "memory_report": True,
            "no_jit": ["denoise", "decode"],
            "compile_cache": False,
            "profile": "traces",
            "profile_calls": 2,
        },
        named=str,
    )
    given = {name: getattr(how, name) for name in vars(how)}
    settings = Settings(**given, report=Path("r.json"))
    keep_asked(kept / "runs" / "good", settings, "fox.gif")
    found = asked_for(kept_run(kept, "good"), Settings())
    for name, value in given.items():
        if isinstance(value, Path):
            value = value.absolute()
        assert getattr(found, name) == value, name
    assert (found.out, found.report) == (
        str(Path("fox.gif").absolute()),
        Path("r.json").absolute(),
    )
    assert asked_for(kept_run(kept, "good"), Settings(out="v.gif")).out == "v.gif"
    with pytest.raises(ArtifactError, match="tpuport runs clean dead"):
        asked_for(kept_run(kept, "dead"), Settings())


def test_an_empty_name_of_a_report_is_a_path_and_no_text(kept: Path) -> None:
    run = kept_run(kept, "good")
    file = run.folder / "asked.json"
    reseal(file, {**json.loads(file.read_text()), "report": ""})
    assert asked_for(run, Settings()).report == Path()


@pytest.mark.parametrize(
    ("field", "value"),
    [("out", 3), ("report", []), ("settings", {"mesh": 3}), ("settings", {"x": 1})],
)
def test_an_altered_wish_is_named_by_its_field(
    kept: Path, field: str, value: object
) -> None:
    run = kept_run(kept, "good")
    file = run.folder / "asked.json"
    reseal(file, {**json.loads(file.read_text()), field: value})
    with pytest.raises(ArtifactError, match=f"has no usable {field}") as caught:
        asked_for(run, Settings())
    assert str(caught.value).startswith(f"{file}: ")
    assert not run.resumable  # nor does the list say so


def test_runs_are_listed_with_what_is_kept(cli: Cli, kept: Path) -> None:
    assert cli("runs", "--cache-dir", kept / "none").out == "no run is kept\n"
    listed = {
        r["id"]: r for r in cli("runs", "--cache-dir", kept, "--json").json["runs"]
    }
    assert set(listed) == names(kept)
    good = listed["good"]
    assert (good["model"], good["prompts"]) == ("cogvideox", ["a panda", "a fox"])
    assert (good["finished"], good["resumable"]) == (["encode", "denoise"], True)
    files = (kept / "runs" / "good").iterdir()
    assert good["bytes"] == sum(f.stat().st_size for f in files)
    assert not listed["dead"]["resumable"]
    with working_in(kept / "runs" / "good"):
        text = cli("runs", "--cache-dir", kept).out
    (row,) = (line for line in text.splitlines() if line.startswith("good"))
    assert "encode denoise" in row
    assert f"in process {os.getpid()}" in row
    assert row.endswith("a panda")


def test_a_line_of_the_list_fits_the_terminal(
    cli: Cli, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kept / "runs" / "good" / RUN_FILE
    run = json.loads(file.read_text())
    run["settings"]["prompts"] = ["a fox in the snow " * 20]
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
    os.utime(kept / "runs" / "good" / RUN_FILE, (old, old))
    with working_in(kept / "runs" / "good"):
        assert "0 runs removed" in cli("runs", "clean", "--all", *cache).out
        ran = cli("runs", "clean", "good", *cache)
        assert ran.code == 1
        assert f"process {os.getpid()}" in ran.last
    assert "1 run removed" in cli("runs", "clean", *cache).out
    assert names(kept) == set()


def test_clean_removes_what_is_named_or_all(cli: Cli, kept: Path) -> None:
    cache = ("--cache-dir", kept)
    assert "removed good" in cli("runs", "clean", "good", *cache).out
    ran = cli("runs", "clean", "good", *cache)
    assert ran.code == 2
    assert "no run 'good' is kept" in ran.last
    assert cli("runs", "clean", "dead", "--all", *cache).code == 2
    assert cli("runs", *cache, "clean").code == 2
    assert "2 runs removed" in cli("runs", "clean", "--all", *cache).out


def test_a_run_that_would_fail_again_says_why(
    cli: Cli, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    good = RunDirectory(kept / "runs" / "good")
    wrong = VideoError("denoise: the latents are NaN; " + "and so on " * 20)
    with pytest.raises(VideoError) as caught, going_on(good.path):
        raise wrong
    assert "Go on with" not in "".join(caught.value.__notes__)
    (why,) = (line for line in _listed(cli, kept) if "failed: " in line)
    assert why.startswith("  failed: denoise: the latents are NaN; and")
    assert len(why) == 100
    assert kept_run(kept, "good").failed == str(wrong).strip()

    # What can pass replaces what the earlier try said.
    with pytest.raises(KeyboardInterrupt) as ended, going_on(good.path):
        raise KeyboardInterrupt
    assert "Go on with" in ended.value.__notes__[0]
    assert any("can go on" in line for line in _listed(cli, kept))


def test_clean_removes_what_would_fail_again(cli: Cli, kept: Path) -> None:
    good = RunDirectory(kept / "runs" / "good")
    with pytest.raises(VideoError), going_on(good.path):
        raise VideoError("NaN")
    cli("runs", "clean", "--cache-dir", kept)
    assert names(kept) == set()


def test_clean_removes_a_run_whose_lock_became_a_folder(cli: Cli, kept: Path) -> None:
    lock = kept / "runs" / "good" / LOCK_FILE
    lock.unlink(missing_ok=True)
    (lock / "inside").mkdir(parents=True)
    ran = cli("runs", "clean", "--all", "--cache-dir", kept)
    assert ran.code == 0, ran.err
    assert not lock.parent.exists()


def _listed(cli: Cli, cache: Path) -> list[str]:
    return cli("runs", "--cache-dir", cache).out.splitlines()


# --- real processes, which import torch and jax: some seconds each

#: The line of a stage that has ended.
ENDED = "^{}\\b.* in \\d"
GENERATE = ("generate", "--prompt", "a fox", *SMALL, "--out", "fox.gif")


def test_a_killed_run_goes_on(cli: Cli, cache: Path, tmp_path: Path) -> None:
    """After a kill nobody could say anything; `runs` has all that is needed."""
    killed = kill(
        GENERATE,
        tmp_path,
        signal.SIGKILL,
        cache=cache,
        line=ENDED.format("denoise"),
        after=0.4,
    )
    assert killed.code == 137, killed.err
    (run,) = cli("runs", "--json").json["runs"]
    assert (run["finished"], run["process"]) == (["encode", "denoise"], None)
    ran = cli("resume", run["id"], "--json")
    assert ran.code == 0, ran.err
    assert ran.json["reused"] == ["encode", "denoise"]
    assert read_back(tmp_path / "fox.gif")[:3] == (9, 64, 96)
    assert names(cache) == set()


@pytest.mark.parametrize(
    ("signum", "line", "code", "said"),
    [
        (signal.SIGINT, "^importing", 130, "interrupted"),
        (
            signal.SIGTERM,
            ENDED.format("encode"),
            143,
            "Go on with: tpuport resume",
        ),
    ],
)
def test_a_signal_says_how_to_go_on(
    cli: Cli,
    cache: Path,
    tmp_path: Path,
    signum: signal.Signals,
    line: str,
    code: int,
    said: str,
) -> None:
    killed = kill(GENERATE, tmp_path, signum, cache=cache, line=line, after=0.3)
    assert (killed.code, killed.sent) == (code, True), killed.err
    assert said in killed.err.splitlines()[-1]
    assert "Traceback" not in killed.err
    assert not (tmp_path / "fox.gif").exists()
    assert cli("runs", "clean", "--all").code == 0
