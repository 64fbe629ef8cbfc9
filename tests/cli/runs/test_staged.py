"""Runs of any pipeline in stages, and runs that go on: the bytes of one run."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from tests.cli import tools
from tests.cli.tools import Cli, example
from tests.measure.kills import kill
from tests.processes import Once
from tpuport.cli.asked import environment
from tpuport.cli.runs import staged
from tpuport.core.files.fingerprint import versions
from tpuport.core.files.run_record import TAPE_FILE
from tpuport.errors import WriteError

ASKED = (*tools.ASKED[:7], "4", *tools.ASKED[8:])


def without(folder: Path, place: Path, *components: str) -> Path:
    """A copy of a checkpoint without the weights of some components."""
    shutil.copytree(folder, place)
    for name in components:
        for file in (place / name).glob("*.safetensors"):
            file.unlink()
    return place


def test_stages_over_machines_make_the_video_of_one_run(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    """Each stage needs the weights that it calls; the run's folder may move."""
    seeds = ("--seed", "3,4")
    cli.good("generate", "--weights", folder, *ASKED, *seeds, "--out", "one.gif")
    first = without(folder, tmp_path / "first", "transformer", "vae")
    ran = cli.good(
        "encode", "--weights", first, *ASKED, *seeds, "--run-dir", "a", "--json"
    )
    assert [stage["stage"] for stage in ran.json["report"]["stages"]] == ["encode"]
    early = ("decode", "--run-dir", "a", "--weights", folder)
    told = "the stage denoise is not finished; run `tpuport denoise"
    cli.refused(told, *early, code=1)
    shutil.move("a", "b")
    second = without(folder, tmp_path / "second", "text_encoder", "vae")
    ran = cli.good("denoise", "--run-dir", "b", "--weights", second, "--json")
    assert [stage["stage"] for stage in ran.json["report"]["stages"]] == ["denoise"]
    third = without(folder, tmp_path / "third", "text_encoder", "transformer")
    last = ("decode", "--run-dir", "b", "--weights", third, "--out", "two.gif")
    ran = cli.good(*last, "--json")
    assert [stage["stage"] for stage in ran.json["report"]["stages"]] == ["decode"]
    ones, twos = sorted(Path().glob("one*.gif")), sorted(Path().glob("two*.gif"))
    assert len(ones) == len(twos) == 2
    for one, two in zip(ones, twos, strict=True):
        assert one.read_bytes() == two.read_bytes()
    again = cli.good("denoise", "--run-dir", "b", "--weights", second)
    assert "a step" not in again.err


def test_videos_are_made_together_where_rows_are_split(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    """Videos of one call, in stages too; a replay makes the call again."""
    prompts = ("--prompt", "a bird", "--prompt", "a cat")
    asked = ("--weights", folder, *ASKED, *prompts, "--seed", "3")
    one_by_one = cli.good("generate", *asked, "--out", "one/", "--json").json
    ran = cli.good("generate", *asked, "--mesh", "dp=3", "--out", "both/", "--json")
    assert "video 2" not in ran.err
    for one, both in zip(one_by_one["videos"], ran.json["videos"], strict=True):
        assert one["prompt"] == both["prompt"]
        frames = [
            [np.asarray(Image.open(f), int) for f in sorted(Path(v["path"]).iterdir())]
            for v in (one, both)
        ]
        assert np.abs(np.subtract(*frames)).max() <= 1
    again = cli.good("replay", ran.json["videos"][1]["path"], "--out", "again.gif")
    assert "the same frames as " in again.last
    cli.good("encode", *asked, "--batch-size", "2", "--run-dir", "run")
    cli.good("denoise", "--run-dir", "run")
    staged = cli.good("decode", "--run-dir", "run", "--out", "staged/", "--json").json
    assert len(staged["videos"]) == 3
    assert len(list(Path("run").glob("video-*"))) == 2


def test_the_image_of_a_run_goes_with_its_folder(
    cli: Cli, tmp_path: Path, once: Once
) -> None:
    folder = example(once, "LTXImageToVideoPipeline")
    Image.effect_noise((32, 32), 60).convert("RGB").save("start.png")
    size = ("--size", "32x32", "--image", "start.png")
    plain = ("--backend", "diffusers")
    asked = ("--weights", folder, *ASKED[:2], *size, *ASKED[4:], *plain)
    cli.good("generate", *asked, "--out", "one.gif")
    cli.good("encode", *asked, "--run-dir", "run")
    Path("start.png").unlink()
    cli.good("denoise", "--run-dir", "run", *plain)
    cli.good("decode", "--run-dir", "run", "--out", "two.gif", *plain)
    assert Path("one.gif").read_bytes() == Path("two.gif").read_bytes()


def test_memory_a_profile_and_op_by_op(cli: Cli, folder: Path) -> None:
    asked = ("generate", "--weights", folder, *ASKED)
    plain = cli.good(*asked, "--out", "plain/", "--json").json
    ran = cli.good(
        *(*asked, "--memory-report", "--profile", "traces", "--profile-calls", "2"),
        *("--out", "noted/", "--json"),
    )
    assert "denoise  step 1" in ran.err
    stages = {one["stage"]: one for one in ran.json["report"]["stages"]}
    noted = stages["denoise"]["memory"]
    assert {one["program"] for one in noted} == {"transformer"}
    assert all(one["devices"][0]["peak"] > 0 for one in noted)
    assert stages["denoise"]["profile"] == {"folder": "traces/denoise", "calls": 2}
    assert list(Path("traces/denoise").rglob("*.trace.json.gz"))
    slow = cli.good(*asked, "--no-jit-stage", "denoise", "--out", "slow/", "--json")
    found = {one["stage"]: one for one in slow.json["report"]["stages"]}
    assert found["denoise"]["op_by_op"]
    assert not found["denoise"]["compiles"]
    assert found["decode"]["compiles"]
    frames = [
        [np.asarray(Image.open(f), int) for f in sorted(Path(name).iterdir())]
        for document in (plain, ran.json, slow.json)
        for name in [document["videos"][0]["path"]]
    ]
    assert np.array_equal(frames[0], frames[1])
    assert np.abs(np.subtract(frames[0], frames[2])).max() <= 1


def test_upstreams_own_code_runs_in_stages_too(cli: Cli, folder: Path) -> None:
    asked = ("--weights", folder, *ASKED, "--backend", "diffusers")
    cli.good("generate", *asked, "--out", "one.gif")
    cli.good("encode", *asked, "--run-dir", "run")
    cli.good("denoise", "--run-dir", "run")
    ran = cli.good("resume", "run", "--out", "two.gif")
    assert "going on with the run in run, after step 4" in ran.err
    assert Path("one.gif").read_bytes() == Path("two.gif").read_bytes()


#: Many steps, so that a signal comes between two of them.
LONG = (*ASKED[:6], "--steps", "400", *ASKED[8:], "--checkpoint-every", "1")


@pytest.mark.parametrize(
    ("signum", "code", "resumes"),
    [(signal.SIGKILL, 137, True), (signal.SIGTERM, 143, False)],
)
def test_a_run_that_was_ended_goes_on(
    cli: Cli,
    cache: Path,
    folder: Path,
    tmp_path: Path,
    signum: signal.Signals,
    code: int,
    resumes: bool,
) -> None:
    """By `resume`, or by the same command. It starts a process: more than 10 s."""

    def stepped(said: str) -> bool:
        tapes = (cache / "runs").glob(f"*/video-0/{TAPE_FILE}")
        return any(json.loads(tape.read_text())["stepped"] for tape in tapes)

    asked = ("generate", "--weights", str(folder), *LONG, "--out")
    cli.good(*asked, "one.gif")
    place = tmp_path / "place"
    place.mkdir()
    killed = kill((*asked, "fox.gif"), place, signum, cache=cache, ready=stepped)
    assert (killed.code, killed.sent) == (code, True), killed.err
    (run,) = cli("runs", "--json").json["runs"]
    (done,) = run["finished"]
    assert done.startswith("step ")
    if signum == signal.SIGTERM:
        said = killed.err.splitlines()[-1]
        assert f"finished: {done}; kept in" in said
        assert f"Go on with: tpuport resume {run['id']}" in said
    if resumes:
        cli.good("resume", run["id"])
    else:
        ran = cli.good(*asked, place / "fox.gif")
        assert "going on with the run in" in ran.err
    assert (place / "fox.gif").read_bytes() == Path("one.gif").read_bytes()
    assert cli("runs", "--json").json["runs"] == []


def test_a_run_of_something_else_is_refused(
    cli: Cli, copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("--weights", copied, *ASKED, "--run-dir", "run")
    cli.good("encode", *asked)

    def refused(told: str, *command: str | Path) -> None:
        ran = cli(*command)
        assert ran.code == 1
        assert told in ran.last
        assert "use another folder" in ran.last

    refused("asked.seed is [0], asked [5]", "generate", *asked, "--seed", "5")
    refused('asked.mesh is "dp=1', "generate", *asked, "--mesh", "sp=2")
    with monkeypatch.context() as patch:
        now = {**versions(), "diffusers": "9.9"}
        patch.setattr(staged, "versions", lambda: now)
        told = 'versions.diffusers is "0.42.1", asked "9.9"'
        refused(told, "denoise", "--run-dir", "run")
        refused(told, "generate", *asked)
    config = copied / "scheduler" / "scheduler_config.json"
    config.write_text(config.read_text().replace("{", '{"tpuport_test": 1,', 1))
    refused("weights.scheduler is ", "denoise", "--run-dir", "run")


def test_a_torn_checkpoint_is_refused(cli: Cli, folder: Path) -> None:
    cli.good("encode", "--weights", folder, *ASKED, "--run-dir", "run")
    (file,) = Path("run/video-0").glob("calls-*.safetensors")
    file.write_bytes(file.read_bytes()[:-1])
    for command in (("denoise", "--run-dir", "run"), ("resume", "run")):
        cli.refused(f"{file}: is torn", *command, code=1)


def test_there_is_nothing_to_resume(cli: Cli, tmp_path: Path) -> None:
    for place, told in ((tmp_path / "none", "no run"), (tmp_path, "holds no run")):
        ran = cli("resume", place)
        assert (ran.code, told in ran.last) == (2, True)
    with mock.patch.object(environment, "import_libraries", None):
        cli.refused("no run was begun here", "denoise", "--run-dir", "none")


def test_another_number_of_frames_is_told(cli: Cli, folder: Path) -> None:
    """Upstream rounds the number that its autoencoder cannot make."""
    asked = ("--weights", folder, *ASKED[:4], "--frames", "6", *ASKED[6:])
    ran = cli.good("generate", *asked, "--backend", "diffusers", "--out", "a.gif")
    assert "WanPipeline made 5 frames, not 6" in ran.err


def test_a_folder_that_cannot_be_made_is_an_error(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no reason to try the next name, for ever."""

    tried: list[Path] = []

    @contextlib.contextmanager
    def full(place: Path) -> Iterator[Path]:
        tried.append(place)
        assert len(tried) == 1
        raise WriteError(f"{place}: cannot be written: no room is left")
        yield

    monkeypatch.setattr(staged, "temporary", full)
    ran = cli("generate", "--weights", folder, *ASKED)
    assert (ran.code, "cannot be written" in ran.last) == (1, True), ran.err
