"""``tpuport batch`` whose videos go to a store: S3 as moto serves it."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import s3fs

from tests.cli.batches.test_local import FLAGS, alone, write
from tests.cli.tools import Cli
from tests.processes import Running
from tpuport.cli.batches.lease import leased
from tpuport.core.files.stores import StorePath

OUT = StorePath("s3", "bucket/videos")
ASKED = ("--out", OUT, "--json", *FLAGS, "--backend", "diffusers")


def records(name: str) -> list[dict[str, Any]]:
    """What a file of lines in the store holds."""
    return [json.loads(line) for line in (OUT / name).read_bytes().splitlines()]


def test_a_batch_in_a_store_goes_on_and_makes_nothing_twice(
    cli: Cli,
    cache: Path,
    folder: Path,
    store: s3fs.S3FileSystem,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put = StorePath.put

    def seen(self: StorePath, file: Path, **how: Any) -> None:
        # Else a kill would leave a folder that is of no batch.
        assert (OUT / "results.jsonl").exists()
        put(self, file, **how)

    monkeypatch.setattr(StorePath, "put", seen)
    lines: list[dict[str, Any]] = [
        {"prompt": "a fox", "size": "32x16", "id": "fox"},
        {"prompt": "a cat", "size": "16x16", "seed": [3, 4], "out": "cat/"},
        {"prompt": "odd", "size": "20x20", "id": "odd"},
    ]
    asked = ("batch", write(*lines), "--weights", folder, *ASKED)
    ran = cli(*asked)
    assert (ran.code, ran.json["made"], ran.json["failed"]) == (1, 2, 1), ran.err
    frames = [f"frame-0000{n}.png" for n in range(5)]
    wanted = [f"cat/00{n}/{frame}" for n in range(2) for frame in frames]
    wanted += [f"cat/00{n}.png.json" for n in range(2)]
    wanted += ["errors.jsonl", "fox.mp4", "fox.mp4.json", "results.jsonl"]
    assert sorted(OUT.files()) == sorted(wanted)
    by_upstream = {**lines[0], "backend": "diffusers"}
    made = (OUT / "fox.mp4").read_bytes()
    assert made == alone(cli, folder, by_upstream, "alone.mp4")
    first = records("results.jsonl")
    names = [(one["line"], one["file"], one["seed"]) for one in first]
    assert names == [(1, "fox.mp4", 0), (2, "cat/000", 3), (2, "cat/001", 4)]
    assert not list((cache / "batches").rglob("*.json"))

    # What a kill leaves: lines that were not put, a sidecar that was not, a frame.
    (OUT / "results.jsonl").write_bytes(b"")
    (OUT / "cat/000.png.json").remove()
    (OUT / "cat/000/frame-00004.png").remove()
    before = OUT.files()["fox.mp4"]
    again = cli(*asked)
    assert (again.json["done"], again.json["made"]) == (2, 1), again.err
    assert sorted(OUT.files()) == sorted(wanted)
    assert OUT.files()["fox.mp4"] == before
    for now in records("results.jsonl"):
        old = next(one for one in first if one["file"] == now["file"])
        assert {**now, "seconds": 0} == {**old, "seconds": 0}
    assert [one["line"] for one in records("errors.jsonl")] == [3]

    # Another request under the same id, a damaged video, a place of others.
    write({**lines[0], "seed": 1})
    other = cli(*asked)
    assert (other.json["made"], other.json["failed"]) == (0, 1)
    assert "of another request" in records("errors.jsonl")[0]["error"]
    (OUT / "fox.mp4").write_bytes(b"cut short")
    write(lines[0])
    assert cli(*asked).json["made"] == 1
    assert (OUT / "fox.mp4").read_bytes() == made
    cli.refused("is in the folder of the batch", *asked, "--report", OUT / "r.json")
    StorePath("s3", "bucket/other/letter.txt").write_bytes(b"")
    cli.refused("is of no batch", *asked, "--out", "s3://bucket/other")
    cli.refused("s3://none: cannot be written", *asked, "--out", "s3://none", code=1)
    dead = (*asked, "--out", "s3://bucket/new", "--ray", "127.0.0.1:1")
    cli.refused("there is no cluster", *dead)
    assert not StorePath("s3", "bucket/new").files()
    assert not list((cache / "batches").rglob("*"))
    # Requests of a store, and of the standard input.
    StorePath("s3", "bucket/lists/p.jsonl").write_bytes(json.dumps(lines[0]).encode())
    there = cli(*asked[:1], "s3://bucket/lists/p.jsonl", *asked[2:])
    assert (there.json["done"], there.json["made"]) == (1, 0), there.err
    given = io.TextIOWrapper(io.BytesIO(json.dumps(lines[0]).encode() + b"\n\xff"))
    monkeypatch.setattr("sys.stdin", given)
    piped = cli(*asked[:1], "-", *asked[2:])
    assert (piped.json["done"], piped.json["failed"]) == (1, 1), piped.err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\n")))
    cli.refused("the standard input has no requests", "batch", "-", *asked[2:])
    none = "file of requests s3://bucket/none.jsonl does not exist"
    cli.refused(none, "batch", "s3://bucket/none.jsonl", *asked[2:])
    # Another driver.
    with leased(OUT):
        cli.refused("is at work in this folder; wait", *asked, code=1)
    # Bad lines alone are noted, and the same command goes on.
    write({"prompt": "a fox", "size": "20x20", "id": "odd", "steps": "many"})
    for _ in range(2):
        assert cli(*asked, "--out", "s3://bucket/bad").json["failed"] == 1
    bad = sorted(StorePath("s3", "bucket/bad").files())
    assert bad == ["errors.jsonl", "results.jsonl"]


def test_after_a_kill_another_machine_goes_on_from_the_checkpoint(
    cli: Cli,
    cache: Path,
    folder: Path,
    store: s3fs.S3FileSystem,
    tmp_path: Path,
) -> None:
    """A process is killed in mid-video: more than 10 s."""
    lines = [
        {"prompt": "a fox", "size": "32x16", "id": "fox"},
        {"prompt": "a fox", "size": "32x16", "steps": 300, "id": "long"},
        {"prompt": "a cat", "size": "32x16", "id": "cat"},
    ]
    flags = ("--weights", folder, *ASKED, "--checkpoint-every", "1")
    asked = ["batch", write(*lines), *flags]
    environment = os.environ | {"TPUPORT_CACHE_DIR": str(tmp_path / "lost")}
    process = Running(["-m", "tpuport", *map(str, asked)], environment)
    until = time.monotonic() + 300
    while not (OUT / "runs/long/video-0/tape.json").exists():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.done()
    before = OUT.files()
    assert {"fox.mp4", "fox.mp4.json"} <= set(before)
    assert "long.mp4" not in before
    # What a kill leaves between a video and the end of its run.
    (OUT / "runs/fox/video-0/tape.json").write_bytes(b"{}")

    ran = cli.good(*asked)  # in another cache folder
    assert (ran.json["done"], ran.json["made"]) == (3, 2)
    assert "going on with the run in" in ran.err
    after = OUT.files()
    assert after["fox.mp4"] == before["fox.mp4"]
    assert not [name for name in after if name.startswith("runs/")]
    assert sorted(one["key"] for one in records("results.jsonl")) == [
        *("cat", "fox", "long")
    ]
    by_upstream = {**lines[1], "backend": "diffusers"}
    assert (OUT / "long.mp4").read_bytes() == alone(
        cli, folder, by_upstream, "alone.mp4"
    )
