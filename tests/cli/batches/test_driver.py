"""Who gets which request, and what becomes of those that replicas do not survive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from tpuport.cli.asked.settings import Settings
from tpuport.cli.batches.driver import TRIES, Batch
from tpuport.cli.batches.folder import BatchFolder
from tpuport.cli.batches.local import Ended, ThisProcess, Told
from tpuport.cli.batches.requests import Request, read_requests
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
    """Replicas of which a request named poison leaves nothing."""

    def __init__(self, count: int) -> None:
        self.given: dict[int, Request] = {}
        self.count = count
        self.order: list[tuple[int, Request]] = []

    def idle(self) -> list[int]:
        return [n for n in range(self.count) if n not in self.given]

    def begin(self, replica: int, request: Request) -> None:
        self.given[replica] = request
        self.order.append((replica, request))

    def wait(self) -> list[Ended]:
        number = next(iter(self.given))  # the one at work for longest
        request = self.given.pop(number)
        poison = request.key == "poison"
        if not poison:
            make(request)
        return [Ended(replica=number, request=request, error="", lost=poison)]


def batch(tmp_path: Path, *lines: dict[str, Any]) -> tuple[Batch, BatchFolder]:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    folder = BatchFolder(tmp_path / "out")
    with folder.held():
        return Batch.read(file, folder, Settings()), folder


def test_a_request_that_no_replica_survives_is_given_up(tmp_path: Path) -> None:
    good = [{"prompt": f"fox {n}"} for n in range(4)]
    made, folder = batch(tmp_path, {"prompt": "x", "id": "poison"}, *good)
    replicas = Fake(2)
    made.run(replicas, Display())
    assert (made.made, made.failed, made.left) == (4, 1, 0)
    tried = [request.key for _, request in replicas.order]
    assert tried.count("poison") == TRIES
    (error,) = map(json.loads, folder.errors.read_text().splitlines())
    assert (error["line"], error["key"], error["tries"]) == (1, "poison", TRIES)
    assert len(folder.results.read_text().splitlines()) == 4


def test_a_replica_keeps_to_its_shape(tmp_path: Path) -> None:
    sizes = ("32x16", "16x16")
    lines = [{"prompt": f"fox {n}", "size": sizes[n % 2]} for n in range(12)]
    made, _ = batch(tmp_path, *lines)
    replicas = Fake(2)
    made.run(replicas, Display())
    shapes = [{r.shape for n, r in replicas.order if n == number} for number in (0, 1)]
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


def test_one_process_says_which_errors_may_pass(tmp_path: Path) -> None:
    """As a replica of Ray does: memory that others took is worth another try."""
    raised: list[Exception] = [MemoryError(), UsageError("a seed is missing")]

    class Engine:
        def make(self, settings: Settings, digest: str) -> None:
            raise raised.pop(0)

    replica = ThisProcess(cast("Any", Engine()), Told(Display(lambda: None)))
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a fox"}')
    (request,) = read_requests(file, tmp_path, Settings())
    assert isinstance(request, Request)
    found = []
    for _ in range(2):
        replica.begin(0, request)
        (ended,) = replica.wait()
        found.append((ended.error, ended.lost))
    assert found == [("MemoryError", True), ("a seed is missing", False)]
