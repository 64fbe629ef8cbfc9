"""Who gets which request, and what becomes of those that replicas do not survive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
from PIL import Image

from tpuport.cli.asked.settings import Settings
from tpuport.cli.batches.driver import TRIES, Batch
from tpuport.cli.batches.folder import BatchFolder
from tpuport.cli.batches.local import Ended, ThisProcess, Told
from tpuport.cli.batches.packs import Pack, packs
from tpuport.cli.batches.requests import Request, read_requests
from tpuport.cli.runs.variants import NO_PROMPT
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.sealed_json import sidecar_bytes, sidecar_path
from tpuport.core.run.progress import Display
from tpuport.errors import UsageError


def make(request: Request) -> None:
    """The videos of a request, as far as a batch looks at them."""
    for path in request.paths:
        path.write_text(request.key)
        sidecar = {
            "batch": request.digest,
            "video": 0,
            "request": {"seeds": [list(request.settings.seed)]},
            "output": {"sha256": hash_output(path)[0]},
            "summary": {"total_seconds": 1.0},
            "frames_sha256": "",
        }
        sidecar_path(path).write_bytes(sidecar_bytes(sidecar))


class Fake:
    """Replicas of which a request named poison leaves nothing.

    A call with one named bad makes no video, nor does one of more than ``most``.
    """

    def __init__(self, count: int, most: int = 100) -> None:
        self.most = most
        self.given: dict[int, Pack] = {}
        self.count = count
        self.order: list[tuple[int, Pack]] = []

    def idle(self) -> list[int]:
        return [n for n in range(self.count) if n not in self.given]

    def begin(self, replica: int, pack: Pack) -> None:
        self.given[replica] = pack
        self.order.append((replica, pack))

    def wait(self) -> list[Ended]:
        number = next(iter(self.given))  # the one at work for longest
        pack = self.given.pop(number)
        poison = any(request.key == "poison" for request in pack)
        bad = any(request.key == "bad" for request in pack)
        videos = sum(request.count for request in pack)
        together = min(videos, pack[0].settings.batch_size or 1)
        if not (poison or bad or together > self.most):
            for request in pack:
                make(request)
        return [Ended(replica=number, pack=pack, error="", lost=poison)]

    def keys(self) -> list[list[str]]:
        """The requests of each call, in order."""
        return [[request.key for request in pack] for _, pack in self.order]


def batch(
    tmp_path: Path, *lines: dict[str, Any], **below: Any
) -> tuple[Batch, BatchFolder]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    folder = BatchFolder(tmp_path / "out")
    with folder.held():
        text = file.read_text()
        return Batch.read(text, str(file), folder, Settings(**below)), folder


def test_a_request_that_no_replica_survives_is_given_up(tmp_path: Path) -> None:
    good = [{"prompt": f"fox {n}"} for n in range(4)]
    made, folder = batch(tmp_path, {"prompt": "x", "id": "poison"}, *good)
    replicas = Fake(2)
    made.run(replicas, Display())
    assert (made.made, made.failed, made.left) == (4, 1, 0)
    assert replicas.keys().count(["poison"]) == TRIES
    (error,) = map(json.loads, folder.errors.read_text().splitlines())
    assert (error["line"], error["key"], error["tries"]) == (1, "poison", TRIES)
    assert len(folder.results.read_text().splitlines()) == 4


def test_a_replica_keeps_to_its_shape(tmp_path: Path) -> None:
    sizes = ("32x16", "16x16")
    lines = [{"prompt": f"fox {n}", "size": sizes[n % 2]} for n in range(12)]
    made, _ = batch(tmp_path, *lines)
    replicas = Fake(2)
    made.run(replicas, Display())
    shapes = [{p[0].shape for n, p in replicas.order if n == one} for one in (0, 1)]
    assert [len(one) for one in shapes] == [1, 1]


def test_a_video_of_another_request_is_kept(tmp_path: Path) -> None:
    fox = {"prompt": "a fox", "id": "fox"}
    made, folder = batch(tmp_path, fox)
    made.run(Fake(1), Display())
    video = folder.path / "fox.mp4"
    assert batch(tmp_path, fox)[0].left == 0
    other, _ = batch(tmp_path, {**fox, "seed": 1})
    assert (other.left, other.failed, video.exists()) == (0, 1, True)
    assert "of another request" in folder.errors.read_text()
    video.write_text("damaged")
    assert batch(tmp_path, fox)[0].left == 1


def test_what_can_be_seen_of_lines_is_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fox = {"prompt": "a fox"}
    wrong = ({"promt": "a"}, {"steps": 2}, {**fox, "model": "x"})
    missing: list[dict[str, Any]] = [{**fox, "image": f"{n}.png"} for n in range(2)]
    made, folder = batch(tmp_path, *wrong, fox, *missing)
    assert (made.failed, made.left) == (5, 1)
    assert capsys.readouterr().err.splitlines() == [
        "5 lines with errors, left out:",
        "  line 1: unknown key 'promt'; did you mean prompt?",
        f"  line 2: {NO_PROMPT}",
        "  line 3: --model: no model is called 'x'; installed: cogvideox, "
        "hunyuanvideo, hunyuanvideo-13b, wan. `tpuport plugins` shows where they come "
        "from",
        f"  and 2 more in {folder.errors}",
    ]
    errors = [json.loads(line) for line in folder.errors.read_text().splitlines()]
    assert errors[-1]["error"] == "--image 1.png does not exist; check the name"


def test_a_second_run_says_what_an_earlier_one_made(tmp_path: Path) -> None:
    lines = [{"prompt": f"fox {n}"} for n in range(3)]
    made, _ = batch(tmp_path, *lines[:2])
    made.run(Fake(1), Display())
    assert made.told() == "2 requests done"
    assert batch(tmp_path, *lines[:2])[0].told() == "2 requests done by an earlier run"
    more, _ = batch(tmp_path, *lines)
    more.run(Fake(1), Display())
    assert more.told() == "3 requests done, 2 of them by an earlier run"


def test_packs_are_of_requests_that_are_alike(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"seed": 5},
        {"prompt": "a fox"},
        {"prompt": "a cat", "seed": 3},
        {"prompt": "a fox", "steps": 3},
        {"prompt": "a cat", "negative_prompt": "blurry"},
        {"prompt": "a fox", "image": "x.png"},
        {"prompt": "a bee", "image": "x.png"},
        {"prompt": "a boat", "seed": [1, 2], "out": "boat.gif"},
        {"prompt": "a dog", "negative_prompt": "dark"},
        {"prompt": "a hen", "seed": [1, 2, 3, 4, 5]},
        {"prompt": "a bee", "checkpoint_every": 5},
        {},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    requests = list(read_requests(file.read_text(), tmp_path, Settings()))
    found = packs(cast("list[Request]", requests), 4)
    assert [[request.line for request in pack] for pack in found] == [
        *([1], [2, 3, 8], [4], [5, 9], [6], [7], [10], [11], [12])
    ]


def test_a_pack_is_made_in_one_call(tmp_path: Path) -> None:
    """Of those left by a run before, others are partners; a line may have its own N."""
    lines = [{"prompt": f"fox {n}", "id": f"fox-{n}"} for n in range(5)]
    own: dict[str, Any] = {"prompt": "a cat", "batch_size": 1}
    made, _ = batch(tmp_path, *lines[:1])
    made.run(Fake(1), Display())
    made, _ = batch(tmp_path, *lines, {**own, "id": "a"}, batch_size=3)
    replicas = Fake(1)
    made.run(replicas, Display())
    assert replicas.keys() == [["fox-1", "fox-2", "fox-3"], ["fox-4"], ["a"]]
    assert (made.made, made.failed) == (5, 0)
    again, _ = batch(tmp_path, *lines, batch_size=2)  # decides no video
    assert again.left == 0


def test_a_bad_request_does_not_take_its_partners(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [{"prompt": f"fox {n}", "id": f"fox-{n}"} for n in range(5)]
    made, folder = batch(tmp_path, {"prompt": "x", "id": "bad"}, *good, batch_size=3)
    replicas = Fake(1)
    made.run(replicas, Display())
    assert replicas.keys() == [
        *(["bad", "fox-0", "fox-1"], ["bad"], ["fox-0"], ["fox-1"]),
        ["fox-2", "fox-3", "fox-4"],
    ]
    assert (made.made, made.failed) == (5, 1)
    (error,) = map(json.loads, folder.errors.read_text().splitlines())
    assert (error["line"], error["key"], error["tries"]) == (1, "bad", 1)
    assert "lines 1, 2, 3: not in one call (" in capsys.readouterr().err


def test_a_pipeline_that_takes_one_prompt_is_told_of_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[dict[str, Any]] = [
        {"prompt": f"fox {n}", "id": f"fox-{n}"} for n in range(6)
    ]
    lines[4]["seed"] = [1, 2]
    Image.new("RGB", (32, 32)).save(tmp_path / "x.png")
    image = {"prompt": "a cat", "seed": [1, 2], "image": str(tmp_path / "x.png")}
    image["id"] = "image"
    made, _ = batch(tmp_path, *lines, image, batch_size=2)
    replicas = Fake(1, most=1)
    made.run(replicas, Display())
    single = [[f"fox-{n}"] for n in range(6)]
    assert replicas.keys() == [["fox-0", "fox-1"], *single, ["image"], ["image"]]
    assert (made.made, made.failed) == (7, 0)
    said = capsys.readouterr().err
    assert said.count("each made alone") == 3
    assert "--batch-size: 1 request from an image, a video or --latents" in said
    assert "lines 1, 2: not in one call (" in said
    assert "line 7: not in one call (" in said


def test_a_pack_that_no_replica_survives_is_taken_apart(tmp_path: Path) -> None:
    good = [{"prompt": f"fox {n}", "id": f"fox-{n}"} for n in range(2)]
    made, folder = batch(tmp_path, {"prompt": "x", "id": "poison"}, *good, batch_size=2)
    replicas = Fake(1)
    made.run(replicas, Display())
    assert replicas.keys() == [
        *[["poison", "fox-0"]] * TRIES,
        *[["poison"]] * TRIES,
        *(["fox-0"], ["fox-1"]),
    ]
    assert (made.made, made.failed) == (2, 1)
    assert "given up after 3 tries" in folder.errors.read_text()


def test_one_process_says_which_errors_may_pass(tmp_path: Path) -> None:
    """As a replica of Ray does: memory that others took is worth another try."""
    raised: list[Exception] = [MemoryError(), UsageError("a seed is missing")]

    class Engine:
        def make_pack(self, requests: Any, folder: Path, kept_in: Any) -> None:
            raise raised.pop(0)

    replica = ThisProcess(cast("Any", Engine()), Told(Display(lambda: None)))
    asked = Settings(run_dir=tmp_path / "run")
    (request,) = read_requests('{"prompt": "a fox"}', tmp_path, asked)
    assert isinstance(request, Request)
    found = []
    for _ in range(2):
        replica.begin(0, (request,))
        (ended,) = replica.wait()
        found.append((ended.error, ended.lost))
    assert found == [("MemoryError", True), ("a seed is missing", False)]
