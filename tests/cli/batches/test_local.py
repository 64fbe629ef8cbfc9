"""``tpuport batch`` on one machine: one pipeline, many requests."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.cli.tools import Cli
from tpuport.cli.batches import cluster
from tpuport.core.files.sealed_json import read_sidecar
from tpuport.core.pipelines.folder import PipelineFolder

#: Flags of all requests; sizes and prompts are the lines' own.
FLAGS = ("--frames", "5", "--steps", "2", "--option", "max_sequence_length=16")


def write(*lines: dict[str, Any] | str) -> Path:
    """A file of requests."""
    file = Path("prompts.jsonl")
    texts = (one if isinstance(one, str) else json.dumps(one) for one in lines)
    file.write_text("\n".join(texts) + "\n")
    return file


def records(file: Path) -> list[dict[str, Any]]:
    """What a file of the batch holds."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def alone(cli: Cli, folder: Path, request: dict[str, Any], name: str) -> bytes:
    """The video that `generate` makes of the same settings."""
    given = {k: v for k, v in request.items() if k not in ("id", "out")}
    flags = [word for k, v in given.items() for word in (f"--{k}", str(v))]
    cli.good("generate", "--weights", folder, *FLAGS, *flags, "--out", name)
    return Path(name).read_bytes()


def test_each_video_is_the_one_made_alone_and_nothing_is_made_twice(
    cli: Cli, folder: Path
) -> None:
    """It makes nine videos of two shapes: more than 10 s."""
    lines: list[dict[str, Any]] = [
        {"prompt": "a fox", "size": "32x16", "id": "fox"},
        {"prompt": "a cat", "size": "16x16", "seed": 3},
        {"prompt": "a cat", "size": "32x16", "out": "cat.gif"},
        {"prompt": "a fox", "size": "16x16", "guidance": 1},
    ]
    file = write(
        *lines, '{"prompt": ', lines[1], {"prompt": "odd", "size": "20x20", "id": "odd"}
    )
    asked = ("batch", file, "--out", "out", "--weights", folder, *FLAGS, "--json")
    out = Path("out")
    loads = mock.patch.object(PipelineFolder, "load", autospec=True)
    with loads as load:
        load.side_effect = loads.temp_original
        ran = cli(*asked)
    assert (ran.code, load.call_count) == (1, 1), ran.err
    wanted = {"done": 4, "made": 4, "failed": 2, "repeated": 1, "requests": 6}
    assert {name: ran.json[name] for name in wanted} == wanted
    errors = records(out / "errors.jsonl")
    assert [error["line"] for error in errors] == [5, 7]
    assert "not JSON" in errors[0]["error"]
    results = {record["line"]: record for record in records(out / "results.jsonl")}
    assert sorted(results) == [1, 2, 3, 4]
    assert (results[1]["file"], results[3]["file"]) == ("fox.mp4", "cat.gif")
    assert (results[2]["seed"], results[2]["seconds"] > 0) == (3, True)
    assert not list(out.glob("runs/*/run.json"))
    for number, request in enumerate(lines, 1):
        made = out / results[number]["file"]
        name = f"alone-{number}{made.suffix}"
        assert made.read_bytes() == alone(cli, folder, request, name), request
        told = read_sidecar(Path(f"{made}.json"))
        assert told["frames_sha256"] == results[number]["frames_sha256"]

    # What a kill leaves: a torn line, a video without its sidecar, no line of a video.
    kept = (out / "results.jsonl").read_text().splitlines(keepends=True)
    (out / "results.jsonl").write_text("".join(kept[:2]) + kept[2][:30])
    torn = out / results[2]["file"]
    Path(f"{torn}.json").unlink()
    before = {p: p.stat().st_mtime_ns for p in out.glob("*.*") if p != torn}
    again = cli(*asked)
    assert (again.json["done"], again.json["made"]) == (4, 1), again.err
    now = {record["line"]: record for record in records(out / "results.jsonl")}
    assert len(records(out / "results.jsonl")) == 4
    for line, record in now.items():
        same = {**record, "seconds": 0} == {**results[line], "seconds": 0}
        assert same, (record, results[line])
    for path in (out / "fox.mp4", out / "cat.gif"):
        assert path.stat().st_mtime_ns == before[path]
    assert [error["line"] for error in records(out / "errors.jsonl")] == [5, 7]


def test_what_is_wrong_with_the_command_is_one_line(cli: Cli, folder: Path) -> None:
    file = write({"prompt": "a fox", "id": "a"}, {"prompt": "a cat", "id": "a"})
    cli.refused("--out is missing", "batch", file)
    cli.refused(
        "--replicas 2: replicas are of a Ray cluster; name it by --ray",
        *("batch", file, "--out", "o", "--replicas", "2"),
    )
    cli.refused("does not exist; check the name", "batch", "none.jsonl", "--out", "o")
    Path("mine").mkdir()
    Path("mine/letter.txt").touch()
    cli.refused("is of no batch", "batch", file, "--out", "mine")
    assert not Path("o").exists()
    empty = Path(shutil.copy(file, "empty.jsonl"))
    empty.write_text("\n")
    cli.refused("has no requests", "batch", empty, "--out", "o")
    good = write({"prompt": "a fox"})
    dead = ("batch", good, "--ray", "127.0.0.1:1")
    cli.refused("--ray 127.0.0.1:1: there is no cluster", *dead, "--out", "o")
    assert not Path("o").exists()
    Path("mine/letter.txt").rename("mine/results.jsonl")
    cli.refused("there is no cluster", *dead, "--out", "mine")
    assert Path("mine/results.jsonl").exists()  # of an earlier batch
    write({"prompt": "a fox", "id": "a"}, {"prompt": "a cat", "id": "a"})
    with mock.patch.dict("sys.modules", {"ray": None}):
        ran = cli("batch", file, "--out", "o", "--ray", "local", "--weights", folder)
    assert (ran.code, "pip install 'tpuport[ray]'" in ran.err) == (2, True), ran.err
    assert "id 'a' is that of line 1" in records(Path("o/errors.jsonl"))[0]["error"]


def test_what_listens_and_is_not_ray_is_one_line(
    cli: Cli,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Ray's own code, in C++, writes to the terminal past Python."""
    monkeypatch.setattr(cluster, "_KNOWN", 3.0)
    asked = ("batch", write({"prompt": "a fox"}), "--weights", folder, "--out", "o")
    with socket.create_server(("127.0.0.1", 0)) as other:
        at = f"127.0.0.1:{other.getsockname()[1]}"
        said = f"--ray {at}: there is no cluster (what listens there does not answer"
        cli.refused(said, *asked, "--ray", at)
    assert capfd.readouterr() == ("", "")
