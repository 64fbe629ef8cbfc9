"""``tpuport plan``: for chips that are not there, of a small pipeline."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.tools import ASKED, Cli
from tests.processes import Done, needs_libtpu, run_python
from tpuport.cli.asked import environment
from tpuport.cli.runs import planning
from tpuport.core.enums import WeightsOn
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.compiler_flags import choose_flags
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.plan.dump_folder import check_dump

ROOT = Path(__file__).resolve().parents[3]

#: What libtpu reads of these, tpuport sets itself.
OF_LIBTPU = ("TPU_", "ALLOW_MULTIPLE_LIBTPU_LOAD", "LIBTPU_", "XLA_FLAGS")


def plan(cache: Path, *args: str) -> Done:
    """In a process of its own, whose environment no test has set up for a TPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_LIBTPU)}
    return run_python(
        ["-m", "tpuport", "plan", *args],
        environment=kept | {"TPUPORT_CACHE_DIR": str(cache)},
        folder=ROOT,
    )


@pytest.fixture(scope="module")
def planned(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path, Done]:
    """The document of a small plan, its dump, and the process; configs are enough."""
    place = tmp_path_factory.mktemp("plan")
    bare = Path(shutil.copytree(folder, place / "bare"))
    for file in bare.rglob("*.safetensors"):
        file.unlink()
    done = plan(
        place / "cache",
        *("--weights", str(bare), "--topology", "v6e-4", "--mesh", "sp=2,tp=2"),
        *(*ASKED, "--dump", str(place / "dump"), "--json"),
        *("--report", str(place / "report.json")),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert json.loads((place / "report.json").read_text()) == document
    return document, place / "dump", done


@needs_libtpu
def test_the_document_has_the_keys_that_scripts_rely_on(planned: Any) -> None:
    found, _, _ = planned
    assert found["fits"] is True
    assert 0 < found["hbm_bytes_per_chip"] < found["hbm_limit_bytes"]
    assert found["hbm_limit_bytes"] == int(31.25 * 2**30)
    assert found["seconds_per_step"] > 0
    assert found["stage_seconds"] == {
        "encode": None,
        "denoise": pytest.approx(2 * found["seconds_per_step"]),
        "decode": None,
    }
    assert found["compile_seconds"] > 0
    assert found["program_bytes"] > 0
    assert {"all-reduce", "tp"} <= {
        value for use in found["collectives"] for value in (use["kind"], use["axis"])
    }
    for use in found["collectives"]:
        assert use["count"] >= 1
        assert use["bytes"] > 0
        assert set(use["axis"].split("+")) <= {"sp", "tp"}


@needs_libtpu
def test_the_time_is_split_and_bounded(planned: Any) -> None:
    found, _, _ = planned
    step = found["seconds_per_step"]
    assert set(found["split"]) == {"attention", "matmul", "collective", "other"}
    assert sum(found["split"].values()) == pytest.approx(step)
    assert sum(found["bounds"].values()) == pytest.approx(step)
    assert found["bound"] == max(found["bounds"], key=found["bounds"].get)
    assert 0 < found["utilization"] < 1
    peak = found["chip"]["peak_flops"] * found["devices"]
    assert found["utilization"] == pytest.approx(
        found["model_flops_per_step"] / (step * peak)
    )


@needs_libtpu
def test_what_is_planned_is_what_would_run(planned: Any) -> None:
    found, _, _ = planned
    assert found["mesh"] == {"dp": 1, "sp": 2, "tp": 2}
    assert found["blocks"] == "native"
    assert found["dtype"] == "bfloat16"
    flags = [flag.text for flag in choose_flags("v6e", (), "denoise").applied]
    assert found["compiler_flags"] == flags
    calls = {call["name"]: (call["stage"], call["calls"]) for call in found["calls"]}
    assert calls == {"text_encoder": ("encode", 2), "transformer": ("denoise", 4)}
    stage = found["stages"]["denoise"]
    (program,) = stage["programs"]
    assert (program["calls"], stage["calls"]) == (4, 2)
    assert found["seconds_per_step"] == pytest.approx(2 * program["seconds"])
    assert {r["split"][1] for r in program["attention"]} == {"tp"}
    memory = program["memory"]
    parts = [v for k, v in memory.items() if k != "total"]
    assert sum(parts) == memory["total"] == found["hbm_bytes_per_chip"]


@needs_libtpu
def test_the_sum_can_be_redone_from_the_dump(planned: Any) -> None:
    found, dump, _ = planned
    assert {p.name for p in dump.iterdir()} == set(found["files"])
    assert "denoise-transformer-0-dp1-sp2-tp2.hlo.txt" in found["files"]
    check_dump(dump)
    (path,) = dump.glob("*.account.json")
    account = json.loads(path.read_text())
    assert 2 * sum(r["seconds"] for r in account["rows"]) == pytest.approx(
        found["seconds_per_step"]
    )
    (hlo,) = dump.glob("*.hlo.txt")
    text = hlo.read_text()
    for row in account["rows"]:
        assert f"%{row['name']} = " in text
    for kernel in found["kernels"]:
        folder = dump / f"{kernel['name']}-{kernel['key'][:8]}"
        cost = json.loads((folder / "cost.json").read_text())
        assert cost["cycles"] == kernel["cycles"]
        assert list((folder / "schedule").glob("*final_bundles.txt"))


@needs_libtpu
def test_the_options_of_attention_reach_the_plan_and_its_text(
    folder: Path, tmp_path: Path
) -> None:
    """Over 10 s: a compile for TPUs. The text has what the document has."""
    done = plan(
        tmp_path,
        *("--weights", str(folder), "--topology", "v6e-1", *ASKED, "--verbose"),
        *("--attention", "splash:window=64,64;block_q=256;block_kv=128"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for part in (
        "num_frames 5",
        "native blocks",
        "fits: ",
        "memory per chip:",
        "bound by the ",
        "% of the chips' peak",
        "attention calls, by what they run as:",
        "splash, block_q 256, block_kv 128",
        "window 64,64",
        "collectives: none",
        "not planned: encode, decode",
        "compile: ",
    ):
        assert part in done.stdout, part


@pytest.mark.parametrize("budget", [0.0, 100.0])
def test_the_best_mesh_may_be_one_half_for_each_call_of_guidance(budget: float) -> None:
    record = SimpleNamespace(query=(1, 3, 64, 8))
    denoise = SimpleNamespace(by_stage={"denoise": 2}, attention=(record,))
    seconds = {"dp=1,sp=4,tp=1": 2.0, "dp=2,sp=2,tp=1": 1.0}
    told: list[str] = []

    def planned(spec: MeshSpec, found: Any) -> Any:
        step = seconds[str(spec)]
        return SimpleNamespace(
            mesh=spec,
            fits=True,
            seconds_per_step=step,
            seconds=step,
            hbm_bytes=1,
            files=[],
        )

    one: Any = SimpleNamespace(
        topology=SimpleNamespace(devices=4, slices=1),
        rehearse=lambda spec: SimpleNamespace(programs=(denoise,)),
        on_chips=planned,
        reporter=SimpleNamespace(say=told.append),
    )
    best: Any = planning._best(one, budget)
    if budget:
        assert str(best.mesh) == "dp=2,sp=2,tp=1"
        assert told == []
    else:
        assert str(best.mesh) == "dp=1,sp=4,tp=1"
        assert told == [
            "no time to plan dp=2,sp=2,tp=1: give more with --budget SECONDS"
        ]


def test_a_search_keeps_all_but_dp_within_a_slice() -> None:
    found = planning._legal(16, [8], 4, 2)
    assert [str(spec) for spec in found if spec.tp == 1] == [
        "dp=2,sp=8,tp=1",
        "dp=4,sp=4,tp=1",
    ]


@needs_libtpu
def test_the_pair_of_guidance_goes_to_two_slices(folder: Path, tmp_path: Path) -> None:
    """Over 10 s: a compile for TPUs."""
    asked = ("--topology", "v6e-16", "--slices", "2", "--json")
    done = plan(tmp_path, "--weights", str(folder), *ASKED, *asked)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert (found["topology"], found["slice_count"]) == ("v6e-16", 2)
    assert found["mesh"] == {"dp": 2, "sp": 16, "tp": 1}
    assert found["devices"] == 32
    # Slices send each other calls' inputs and noise, and all else stays within.
    assert {use["axis"] for use in found["collectives"]} == {"sp", "slices"}
    # Half of what is gathered is a chip's own.
    crosses = {"all-gather": 0.5, "all-to-all": 0.5, "reduce-scatter": 0.5}
    for use in found["collectives"]:
        if use["axis"] == "slices":
            share = crosses.get(use["kind"], 1.0) * use["bytes"]
            assert use["seconds"] == pytest.approx(share / 12.5e9)
    assert 0 < found["bounds"]["data-centre network"] <= found["split"]["collective"]


@pytest.mark.parametrize("asked", WeightsOn)
def test_what_a_chip_refuses_streams_where_that_is_left_open(asked: WeightsOn) -> None:
    """A stand-in for minutes of a compiler that refuses a program for its size."""

    def plan_of(*refused: str) -> Any:
        names = ("transformer", "vae")
        programs = [SimpleNamespace(component=n, error=n in refused) for n in names]
        return SimpleNamespace(programs=programs, fits=not refused)

    on_chip, streaming = plan_of("transformer"), plan_of()
    one: Any = SimpleNamespace(
        streamed=frozenset(),
        settings=SimpleNamespace(weights_on=asked),
        rehearse=lambda spec: SimpleNamespace(may_stream={"transformer", "text"}),
    )
    one.on_chips = lambda spec, found: streaming if one.streamed else on_chip
    auto = asked == WeightsOn.AUTO
    assert planning._One.plan(one, MeshSpec()) is (streaming if auto else on_chip)
    assert one.streamed == ({"transformer"} if auto else frozenset())


@needs_libtpu
@pytest.mark.aot
def test_one_process_plans_for_several_chips(folder: Path, tmp_path: Path) -> None:
    asked = ("--topology", "v5e-4,v6e-4", "--stage", "encode", "--price", "v5e=1,v6e=3")
    given = ("--weights", str(folder), *ASKED, *asked, "--deadline", "60s")
    done = plan(tmp_path, *given, "--report", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads((tmp_path / "report.json").read_text())
    slices = {one["topology"]: one for one in document["slices"]}
    assert {n: one["plan"]["chip"]["name"] for n, one in slices.items()} == {
        "v5e-4": "v5e",
        "v6e-4": "v6e",
    }
    for one in slices.values():
        assert one["fits"]
        assert one["seconds_per_video"] == one["plan"]["run_seconds"] > 0
        hours = one["seconds_per_video"] / 3600
        assert one["cost_per_video"] == one["price_per_chip_hour"] * 4 * hours
    assert document["cheapest"] == min(
        slices, key=lambda n: slices[n]["cost_per_video"]
    )


@needs_libtpu
@pytest.mark.aot
@pytest.mark.parametrize("slices", ["1", "2"])
def test_a_picture_with_fewer_parts_than_devices_compiles(
    tmp_path: Path, slices: str
) -> None:
    # The compiler chooses places of results where a program does not say them.
    asked = ("--model", "cogvideox", "--size", "64x64", "--frames", "9")
    asked += ("--topology", "v6e-8", "--stage", "decode", "--slices", slices, "--json")
    done = plan(tmp_path, *asked)
    assert done.returncode == 0, done.stderr[-3000:]
    axes = {use["axis"] for use in json.loads(done.stdout)["collectives"]}
    assert "slices" not in axes


def test_slices_are_compared_by_a_line_each(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    seconds = {"v5e-8": 50.0, "v6e-8": 20.0, "v5p-8": 70.0}
    stages: list[Any] = []

    def made(settings: Any, topology: Any, asked: Any, **more: Any) -> Any:
        stages.append(asked)
        return SimpleNamespace(
            seconds=seconds[topology.name],
            seconds_per_step=1.0,
            fits=topology.name != "v5p-8",
            hbm_bytes=3 << 30,
            chip=chip(topology.chip),
            as_dict=dict,
        )

    monkeypatch.setattr(environment, "check_libtpu", lambda topology: None)
    monkeypatch.setattr(planning, "plan_run", made)
    asked = ("--weights", str(folder), "--topology", ",".join(seconds))
    ran = cli("plan", *asked, "--price", "v5e=1,v5p=4", "--price", "v6e=3")
    assert ran.code == 0, ran.err
    assert stages == [["encode", "denoise", "decode"]] * 3
    assert [" ".join(line.split()) for line in ran.out.splitlines()] == [
        "slice chips HBM of a device a step a video cost",
        "v5e-8 8 3.00 GiB of 15.75 GiB 1.000 s 50.000 s 0.111",
        "v6e-8 8 3.00 GiB of 31.25 GiB 1.000 s 20.000 s 0.133",
        "v5p-8 4 does not fit: 3.00 GiB of 95.74 GiB - - -",
        "the fastest: v6e-8",
        "the cheapest: v5e-8",
    ]
    for written in ("'v5e=1,v5p=4,v6e=3'", "[v5e=1, 'v5p=4,v6e=3']"):
        (tmp_path / "asked.yaml").write_text(f"price: {written}\n")
        again = cli("plan", *asked, "--config", str(tmp_path / "asked.yaml"))
        assert again.out == ran.out, again.err
    ran = cli("plan", *asked, "--deadline", "10s", "--stage", "denoise", "--json")
    assert ran.json["fastest"] is None
    assert ran.json["stages"] == ["denoise"]
    assert ran.json["slices"][0]["seconds_per_video"] == 50.0
    ran = cli("plan", *asked, "--batch-size", "2", "--json")
    assert ran.json["slices"][0]["seconds_per_video"] == 25.0


def test_a_config_file_may_hold_what_only_plan_has(cli: Cli) -> None:
    Path("p.yaml").write_text("topology: v6e-8\nstage: sing\n")
    ran = cli("plan", "--config", "p.yaml")
    assert ran.code == 2
    assert "--stage 'sing'" in ran.err
    assert ran.last == "p.yaml gives: topology, stage"
    # Flags win.
    ran = cli("plan", "--config", "p.yaml", "--topology", "v6e-7")
    assert "unknown TPU topology 'v6e-7'" in ran.err
    for key, near in (
        ("budgt", "budget"),
        ("step", "steps"),
        ("topologie", "topology"),
    ):
        Path("p.yaml").write_text(f"{key}: 1\n")
        ran = cli("plan", "--config", "p.yaml")
        assert ran.code == 2
        assert ran.last.endswith(f"unknown key '{key}'; did you mean {near}?")
    # What other commands have is not offered.
    Path("p.yaml").write_text("run_di: 1\n")
    assert "run_dir" not in cli("plan", "--config", "p.yaml").last.partition(";")[2]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--topology", "v6e-8", "--mesh", "dp=2,tp=8"), "error: --mesh dp=2,sp=1,"),
        (("--topology", "v6e-8", "--model", "x"), "no model is called 'x'"),
        (
            (),
            "--topology is missing; name a slice, such as --topology v6e-8; there are "
            "v4-8 to ",
        ),
        (("--topology", "v6e-8", "--stage", ""), "--stage '': choose of encode, de"),
        (("--topology", "v6"), "--topology: unknown TPU topology 'v6'"),
        (("--topology", "v6e-8", "--report", str(ROOT)), "is a folder; name a file"),
        (("--topology", "v6e-8", "--image", "none.png"), "--image none.png does not"),
        (("--topology", "v6e-8", "--dump", __file__), "test_plan.py is not a folder"),
        (("--topology", "v6e-8", "--dump", str(ROOT / "docs")), "no earlier --dump wr"),
        (("--topology", "v6e-8,v6e-7"), "unknown TPU topology 'v6e-7'"),
        (("--topology", "v6e-8,v5e-4", "--mesh", "sp=8"), "needs 8 devices, there are"),
        (("--topology", "v6e-8,v5e-4", "--dump", "dump"), "--dump is of one slice"),
        (("--topology", "v6e-8", "--slices", "2", "--mesh", "sp=16"), "multiple of 2;"),
        (("--topology", "v4-8", "--slices", "2"), "--slices 2: Google publishes no"),
        (("--slices", "2"), "--topology"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    cli: Cli, args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Said before torch and jax are imported.
    monkeypatch.setattr(environment, "import_libraries", None)
    ran = cli("plan", *args)
    assert ran.code == 2
    assert ran.err.count("\n") == 1
    assert said in ran.err
    assert ran.out == ""


def test_without_libtpu_it_says_so_in_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name == "libtpu" else found(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    ran = cli("plan", "--topology", "v6e-8")
    assert ran.code == 1
    assert ran.err.count("\n") == 1
    assert "needs libtpu" in ran.err
