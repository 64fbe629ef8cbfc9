"""``tpuport plan``: for chips that are not there, of the demo checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.tools import Cli
from tests.processes import Done, needs_libtpu, run_python
from tpuport.cli.asked.settings import Settings
from tpuport.cli.commands.plan import _final
from tpuport.core.mesh.chips import chip as chip_named
from tpuport.core.mesh.compiler_flags import choose_flags
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.plan.dump_folder import check_dump
from tpuport.core.plan.planner import Planner

ROOT = Path(__file__).resolve().parents[3]

TWO_PROMPTS = ("--prompt", "a panda", "--prompt", "a red car on a bridge")


#: What libtpu reads of these, tpuport sets itself.
OF_LIBTPU = ("TPU_", "ALLOW_MULTIPLE_LIBTPU_LOAD", "LIBTPU_", "XLA_FLAGS")


def plan(cache: Path, *args: str) -> Done:
    """In a process of its own, whose environment no test has set up for a TPU."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(OF_LIBTPU)}
    return run_python(
        ["-m", "tpuport", "plan", *args],
        environment=kept | {"TPUPORT_CACHE_DIR": str(cache)},
        folder=ROOT,
        timeout=550,
    )


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, str]:
    """The document of a small plan, its dump, and what was said on the way."""
    folder = tmp_path_factory.mktemp("plan")
    done = plan(
        folder / "cache",
        *("--topology", "v6e-4", "--mesh", "dp=2,tp=2", "--size", "96x64"),
        *("--frames", "9", "--steps", "3", "--dump", str(folder / "dump"), "--json"),
        *("--report", str(folder / "report.json")),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    assert json.loads((folder / "report.json").read_text()) == document
    return document, folder / "dump", done.stderr


@needs_libtpu
def test_the_document_has_the_keys_that_scripts_rely_on(planned: Any) -> None:
    found, _, _ = planned
    assert found["fits"] is True
    assert 0 < found["hbm_bytes_per_chip"] < found["hbm_limit_bytes"]
    assert found["hbm_limit_bytes"] == int(31.25 * 2**30)
    assert found["seconds_per_step"] > 0
    assert found["stage_seconds"] == {
        "encode": None,
        "denoise": pytest.approx(3 * found["seconds_per_step"]),
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
        assert set(use["axis"].split("+")) <= {"dp", "tp"}


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
    assert found["mesh"] == {"dp": 2, "sp": 1, "tp": 2}
    assert found["settings"]["num_inference_steps"] == 3
    assert found["blocks"] == "native"
    assert found["compiler_flags"] == [
        flag.text for flag in choose_flags("v6e", (), "denoise").applied
    ]
    (program,) = found["stages"]["denoise"]["programs"]
    assert (program["program"], program["calls"]) == ("step", 3)
    assert {r["split"][1] for r in program["attention"]} == {"tp"}
    assert all(r["padded"] for r in program["attention"])
    (weights,) = found["sharding_plans"]
    assert weights["component"] == "transformer"
    assert program["memory"]["weights"] >= weights["bytes_per_device"]
    memory = program["memory"]
    parts = [v for k, v in memory.items() if k != "total"]
    assert sum(parts) == memory["total"] == found["hbm_bytes_per_chip"]


@needs_libtpu
def test_the_sum_can_be_redone_from_the_dump(planned: Any) -> None:
    found, dump, _ = planned
    assert {p.name for p in dump.iterdir()} == set(found["files"])
    check_dump(dump)
    (path,) = dump.glob("*.account.json")
    account = json.loads(path.read_text())
    assert sum(r["seconds"] for r in account["rows"]) == pytest.approx(
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
        rows = [r for r in account["rows"] if r["opcode"] == "custom-call"]
        assert kernel["cycles"] in {r["cycles"] for r in rows}


@needs_libtpu
def test_what_happens_is_said_beside_the_document(planned: Any) -> None:
    _, _, said = planned
    lines = said.splitlines()
    assert lines[0].startswith("planning for v6e-4 ...")
    assert len(lines) <= 5, said


@needs_libtpu
def test_the_text_has_what_the_document_has(tmp_path: Path) -> None:
    done = plan(
        tmp_path,
        *("--topology", "v6e-1", "--size", "96x64", "--frames", "9", "--steps", "2"),
        *("--attention", "reference", "--blocks", "upstream", *TWO_PROMPTS),
        "--verbose",
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for part in (
        "2 videos of 96x64, 9 frames, 2 steps, guidance 6, one after the other",
        "sharding default, upstream blocks",
        "fits: ",
        "memory per chip:",
        "denoise/step",
        "a step, 4 steps",
        "matrix products",
        "bound by the ",
        "% of the chips' peak",
        "attention calls, by what they run as:",
        "denoise/step: reference",
        "asked for by name",
        "collectives: none",
        "not planned: encode, decode",
        "this is the built-in demo",
        "compile: ",
        "transformer on mesh dp=1,sp=1,tp=1",
    ):
        assert part in done.stdout, part


@needs_libtpu
def test_two_compile_at_once_and_the_options_of_attention_reach_them(
    tmp_path: Path,
) -> None:
    """18 CPU seconds: two compiles for TPUs and the schedules of their kernels."""
    small = ("--topology", "v6e-1", "--size", "96x64", "--frames", "9", "--json")
    asked = ("splash", "splash:window=64,64;block_q=256;block_kv=128")

    def planned_with(name: str, text: str) -> Done:
        return plan(tmp_path / name, *small, "--attention", text)

    with ThreadPoolExecutor() as pool:
        both = list(pool.map(planned_with, ("plain", "options"), asked))
    kernels, calls = [], []
    for done, text in zip(both, asked, strict=True):
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout)
        assert found["fits"]
        assert found["compile_seconds"] > 0
        assert found["attention"] == text
        stage = found["stages"]["denoise"]
        (call,) = stage["programs"][0]["attention"]
        calls.append(call)
        (kernel,) = (k for k in found["kernels"] if k["name"] == "tpuport_splash")
        kernels.append(kernel)
    assert [c["implementation"] for c in calls] == ["splash", "splash"]
    assert [c["window"] for c in calls] == [None, [64, 64]]
    assert calls[0]["blocks"] != calls[1]["blocks"]
    assert (calls[1]["blocks"]["block_q"], calls[1]["blocks"]["block_kv"]) == (256, 128)
    # The kernels themselves differ, by the compiler's schedule of each.
    assert kernels[0]["cycles"] != kernels[1]["cycles"]


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


def test_a_mesh_too_large_for_the_slice_is_refused_before_anything_is_loaded(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpuport.cli.commands.plan._plan", None)
    ran = cli("plan", "--topology", "v6e-8", "--mesh", "dp=2,tp=8")
    assert ran.code == 2
    assert "needs 16 devices, there are 8" in ran.last


@pytest.mark.parametrize("asked", [None, "dp=2,tp=4", "dp=2,sp=4"])
def test_a_plan_of_another_mesh_names_the_default(asked: str | None) -> None:
    default = MeshSpec(dp=2, sp=4)
    planner: Any = SimpleNamespace(
        default_mesh=lambda: default,
        plan=lambda spec: SimpleNamespace(mesh=spec, notes=[]),
        unused=lambda spec: spec.unused(8, "chip"),
    )
    made = _final(
        planner, Settings(mesh=asked and MeshSpec.parse(asked)), [], ["denoise"]
    )
    told = ["default mesh here: dp=2,sp=4,tp=1; --mesh auto compares"]
    assert made.notes == (told if made.mesh != default else [])
    assert (made.mesh == default) == (asked != "dp=2,tp=4")


@pytest.mark.parametrize(
    ("chip", "asked", "told"),
    [
        ("v6e", "tp=2", "mesh dp=1,sp=1,tp=2 takes 2 of 8 chips: 6 stay unused"),
        ("v7x", "sp=7", "mesh dp=1,sp=7,tp=1 takes 7 of 8 devices: 1 stays unused"),
        ("v6e", "dp=2,sp=4", None),
    ],
)
def test_a_plan_says_which_chips_stay_unused(
    chip: str, asked: str, told: str | None
) -> None:
    planner: Any = SimpleNamespace(
        chip=chip_named(chip),
        devices=[None] * 8,
        default_mesh=lambda: MeshSpec(dp=2, sp=4),
        plan=lambda spec: SimpleNamespace(mesh=spec, notes=[]),
    )
    planner.unused = lambda spec: Planner.unused(planner, spec)
    made = _final(
        planner, Settings(mesh=asked and MeshSpec.parse(asked)), [], ["denoise"]
    )
    assert [note for note in made.notes if "unused" in note] == ([told] if told else [])


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--topology", "v6e-7"), "unknown TPU topology 'v6e-7'"),
        (("--topology", "v6e-8", "--stage", "sing"), "--stage 'sing'"),
        (("--topology", "v6e-8", "--frames", "10"), "10 frames asked for"),
        (("--topology", "v6e-8", "--mesh", "tp=x"), "not an integer"),
        (("--topology", "v6e-8", "--model", "x"), "x"),
        (
            ("--topology", "v6e-8", "--attention", "foo"),
            "unknown attention implementation 'foo'",
        ),
        (
            *(("--topology", "v6e-8", *TWO_PROMPTS, "--batch", "2"),),
            "2 prompts beside --batch 2",
        ),
        ((), "--topology"),
        (("--topology", "v6e-8", "--dump", __file__), "test_plan.py is not a folder"),
        (("--topology", "v6e-8", "--dump", str(ROOT / "docs")), "no earlier --dump wr"),
        (
            ("--topology", "v6e-8", "--resolution", "480p"),
            "resolution '480p': variant demo has no size classes; use --size",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_what_cannot_be_is_refused_in_one_line(
    cli: Cli, args: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Said before torch and jax are imported.
    monkeypatch.setattr("tpuport.cli.commands.plan.import_libraries", None)
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
