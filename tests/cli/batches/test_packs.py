"""``tpuport batch --batch-size``: several requests in one call of the pipeline."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cli.batches.test_local import FLAGS, records, write
from tests.cli.batches.test_ray import steps, wait_for
from tests.cli.runs.test_loras import write_lora
from tests.cli.runs.test_video_run import pixels
from tests.cli.tools import Cli, example
from tests.processes import Once, Running
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.sealed_json import read_sidecar

#: Of different numbers of tokens.
LONG = "a boat with red sails far out on a wide grey sea"
PLAIN = {"size": "32x16", "backend": "diffusers"}


def check_alone(cli: Cli, asked: tuple[Any, ...], line: dict[str, Any]) -> None:
    """A request's frames are those of `generate`, but for a rounding of one level."""
    name = f"alone-{line['out']}"
    given = {k: v for k, v in line.items() if k not in ("id", "out")}
    flags = [str(w) for k, v in given.items() for w in (f"--{k}".replace("_", "-"), v)]
    cli.good("generate", *asked, *flags, "--out", name)
    found = pixels(f"out/{line['out']}")
    assert found.std() > 1
    assert np.abs(found - pixels(name)).max() <= 1, line


def test_each_video_of_a_call_is_the_one_made_alone(cli: Cli, folder: Path) -> None:
    """Five programs of several rows, and of one: more than 10 s."""
    lines: list[dict[str, Any]] = [
        {"prompt": "a fox", "negative_prompt": "blurry", "seed": 1, "out": "a/"},
        {"prompt": LONG, "negative_prompt": "dark", "seed": 2, "out": "b/"},
        {"prompt": "snow", "negative_prompt": "still", "seed": [3, 4], "out": "c/"},
        {"prompt": "a bee", "negative_prompt": "fast", "seed": 5, "out": "d/"},
    ]
    asked = ("--weights", folder, *FLAGS, "--size", "32x16")
    rows = ("--mesh", "dp=4", "--batch-size", "4")
    file = write(*lines)
    ran = cli.good("batch", file, "--out", "out", *asked, *rows, "--json")
    assert (ran.json["made"], ran.json["failed"]) == (4, 0)
    results = {one["file"]: one for one in records(Path("out/results.jsonl"))}
    assert [(name, one["seed"]) for name, one in results.items()] == [
        *(("a", 1), ("b", 2), ("c/000", 3), ("c/001", 4), ("d", 5))
    ]
    for name, one in results.items():
        assert one["sha256"] == hash_output(Path("out", name))[0]
    assert len({one["frames_sha256"] for one in results.values()}) == 5
    seeds = read_sidecar(Path("out/b.png.json"))["request"]["seeds"]
    assert seeds == [[1, 2, 3, 4]]
    seeds = read_sidecar(Path("out/d.png.json"))["request"]["seeds"]
    assert seeds == [[5, 5, 5, 5]]  # rows must divide
    assert "the same frames as" in cli.good("replay", "out/b").last
    assert not Path("out/runs").exists()
    for line in (*lines[:2], lines[3]):
        check_alone(cli, asked, line)
    for number, seed in enumerate(lines[2]["seed"]):
        check_alone(cli, asked, lines[2] | {"seed": seed, "out": f"c/00{number}/"})
    mesh = rows[:2]
    again = cli.good("batch", file, "--out", "out", *asked, *mesh, "--json").json
    assert (again["made"], again["done"]) == (0, 4)


def test_a_step_cache_and_a_lora_are_those_of_a_request_alone(
    cli: Cli, folder: Path
) -> None:
    """Full and cached steps of one row and of two: more than 10 s."""
    lora = write_lora(folder, seed=1)
    cache = {"cache": "taylorseer:start=1,interval=3", "steps": 6, "size": "32x16"}
    fused = {"lora": f"{lora}:0.5", "size": "32x16"}
    lines: list[dict[str, Any]] = [
        {"prompt": "a fox", "seed": 1, "out": "a/", **cache},
        {"prompt": LONG, "seed": 2, "out": "b/", **cache},
        {"prompt": "a fox", "seed": 1, "out": "c/", **fused},
        {"prompt": LONG, "seed": 2, "out": "d/", **fused},
    ]
    asked = ("--weights", folder, *FLAGS)
    cli.good("batch", write(*lines), "--out", "out", *asked, "--batch-size", "2")
    for line in lines:
        made = read_sidecar(Path(f"out/{line['out'][0]}.png.json"))["request"]
        assert made["seeds"] == [[1, 2]]
        check_alone(cli, asked, line)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HunyuanVideo15Pipeline", "HunyuanVideo15Pipeline failed: RuntimeError"),
        ("LTXPipeline", "LTXPipeline makes one video in a call here"),
    ],
)
def test_a_pipeline_of_one_prompt_is_told_of_once(
    cli: Cli, once: Once, name: str, said: str
) -> None:
    lines = [{"prompt": f"fox {n}", "seed": n, "id": f"fox-{n}"} for n in range(4)]
    asked = ("--frames", "9", "--steps", "2", "--size", "32x32")
    plain = ("--backend", "diffusers", "--batch-size", "2", "--json")
    weights = ("--weights", example(once, name))
    ran = cli.good("batch", write(*lines), "--out", "out", *asked, *weights, *plain)
    assert (ran.json["made"], ran.json["failed"]) == (4, 0)
    (line,) = [one for one in ran.err.splitlines() if "not in one call" in one]
    assert said in line
    assert line.startswith("lines 1, 2: ")


def test_a_killed_call_goes_on_and_its_requests_may_have_other_partners(
    cli: Cli, cache: Path, folder: Path
) -> None:
    """A process starts twice, and is killed: more than 10 s."""
    first: list[dict[str, Any]] = [
        {"prompt": "a fox", "seed": 1, "out": "a/", **PLAIN},
        {"prompt": LONG, "seed": 2, "out": "b/", **PLAIN},
        {"prompt": "snow", "seed": 3, "out": "c/", **PLAIN},
    ]
    asked = ("--weights", folder, *FLAGS[:2], "--steps", "60", *FLAGS[4:])
    batch = ("batch", "prompts.jsonl", "--out", "out", *asked, "--batch-size", "2")
    batch += ("--checkpoint-every", "1")

    def kill(done: int) -> Path:
        environment = os.environ | {"TPUPORT_CACHE_DIR": str(cache)}
        process = Running(["-m", "tpuport", *map(str, batch)], environment)

        def under_way() -> Path | None:
            found = [p for p in Path("out/runs").glob("+*") if steps(p) > 3]
            return found[0] if found else None

        found = wait_for(under_way, process)
        process.send_signal(signal.SIGKILL)
        process.done()
        assert len(records(Path("out/results.jsonl"))) == done
        return Path(found)

    write(*first)
    run_dir = kill(done=0)
    kept = steps(run_dir)
    cli.refused("is of several requests of a batch", "resume", run_dir)
    ran = cli.good(*batch)
    assert f"going on with the run in {run_dir.absolute()}" in ran.err, kept
    assert len(records(Path("out/results.jsonl"))) == 3
    for line in first:
        check_alone(cli, asked, line)

    with_others = [{**line, "out": f"x{line['out']}"} for line in first]
    new = {"prompt": "a bee", "seed": 4, "out": "xd/", **PLAIN}
    write(*with_others)
    kill(done=3)
    write(new, *with_others)
    ran = cli.good(*batch)
    assert "going on" not in ran.err
    assert not Path("out/runs").exists()
    for line, same in zip(first, with_others, strict=True):
        found = pixels(f"out/{same['out']}")
        assert np.abs(found - pixels(f"alone-{line['out']}")).max() <= 1


def test_a_replica_makes_several_requests_in_one_call(cli: Cli, folder: Path) -> None:
    """A cluster starts, and a replica imports what it needs: more than 10 s."""
    pytest.importorskip("ray")
    lines: list[dict[str, Any]] = [
        {"prompt": "a fox", "seed": 1, "out": "a/", **PLAIN},
        {"prompt": LONG, "seed": 2, "out": "b/", **PLAIN},
        {
            "prompt": "snow",
            "seed": 3,
            "size": "9x9",
            "out": "c/",
            "backend": "diffusers",
        },
    ]
    lines.append({**lines[0], "seed": [4, 5], "out": "d/"})
    asked = ("--weights", folder, *FLAGS)
    more = ("--batch-size", "2", "--ray", "local", "--json")
    ran = cli("batch", write(*lines), "--out", "out", *asked, *more)
    assert (ran.code, ran.json["made"], ran.json["failed"]) == (1, 3, 1), ran.err
    for name, seeds in (("a", [1, 2]), ("b", [1, 2]), ("d/000", [4, 5])):
        made = read_sidecar(Path(f"out/{name}.png.json"))["request"]
        assert made["seeds"] == [seeds]
    for line in lines[:2]:
        check_alone(cli, asked, line)
