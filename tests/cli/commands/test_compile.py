"""``tpuport compile``, and the commands that use what it made."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tools import SMALL, Cli, Made, call
from tests.processes import run_python
from tpuport.cli.asked.sessions import check_early, check_run_early
from tpuport.cli.asked.settings import Settings
from tpuport.core.enums import Backend
from tpuport.core.files.sealed_json import read_document, write_document
from tpuport.core.mesh.compiler_flags import choose_flags
from tpuport.core.programs import built_folder
from tpuport.core.programs.executable_files import read_entry
from tpuport.core.programs.folder_place import MANIFEST, MANIFEST_SCHEMA
from tpuport.errors import ArtifactError

PROMPTS = ("--prompt", "a panda", "--prompt", "a fox", "--seed", "7")
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def compiled(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The executables of the shared run, made before anything runs."""
    folder = tmp_path_factory.mktemp("compiled") / "made when missing"
    ran = call(
        *("compile", *SMALL, "--out", folder, "--cache-dir", cache, "--json"),
        *("--report", folder.parent / "report.json"),
    )
    assert ran.code == 0, ran.err
    return ran, folder


def test_the_document_says_what_was_compiled(compiled: Any) -> None:
    ran, folder = compiled
    document = ran.json
    assert document == json.loads((folder.parent / "report.json").read_text())
    assert document["command"] == "compile"
    assert document["topology"] == "local"
    assert document["stages"] == ["encode", "denoise", "decode"]
    named = [f"{p['stage']}/{p['program']}" for p in document["programs"]]
    assert named == ["encode/encode", "denoise/step", "decode/first uint8"]
    assert [p["calls"] for p in document["programs"]] == [1, 2, 1]
    for program in document["programs"]:
        entry = read_entry(folder / program["file"])
        assert entry.size == program["bytes"] > 10_000
        assert program["compile_seconds"] > 0
        assert program["memory"]["arguments"] > 0
    total = sum(p["bytes"] for p in document["programs"])
    assert document["program_bytes"] == total
    assert f"use them with --executables {folder}\n" in ran.err


def test_generate_uses_them_and_compiles_nothing(
    compiled: Any, made: Made, cache: Path, tmp_path: Path
) -> None:
    _, folder = compiled
    ran = call(
        *("generate", *PROMPTS, *SMALL, "--negative-prompt", "blurry", "--json"),
        *("--executables", folder, "--no-compile-cache", "--cache-dir", cache),
        *("--out", tmp_path / "video.mp4"),
    )
    assert ran.code == 0, ran.err
    report = ran.json["report"]
    assert report["warm"] is True
    assert report["programs"] == {"loaded": 3, "cached": 0, "compiled": 0}
    assert "compiling" not in ran.err
    assert "  compiled  nothing: 3 programs loaded\n" in ran.err
    # Bit for bit what a run that compiled made: latents, frames and all.
    for ours, theirs in zip(ran.json["videos"], made.ran.json["videos"], strict=True):
        assert ours["latents_sha256"] == theirs["latents_sha256"]
        assert Path(ours["path"]).read_bytes() == Path(theirs["path"]).read_bytes()
    before = {s["stage"]: s for s in made.ran.json["report"]["stages"]}
    for stage in report["stages"]:
        assert stage["attention"] == before[stage["stage"]]["attention"]
        assert stage["patches"] == before[stage["stage"]]["patches"]
        assert stage["convolutions"] == before[stage["stage"]]["convolutions"]
    (told,) = before["decode"]["convolutions"]
    assert told["implementation"] == "XLA"


def test_another_size_is_refused_by_name(
    compiled: Any, cache: Path, tmp_path: Path
) -> None:
    _, folder = compiled
    ran = call(
        *("generate", "--prompt", "a panda", *SMALL, "--frames", "17"),
        *("--executables", folder, "--cache-dir", cache, "--out", tmp_path / "v.mp4"),
    )
    assert ran.code == 1
    assert "frames 9 -> 17" in ran.err
    assert str(folder) in ran.err
    assert "encode: " not in ran.err


#: What is asked of the shared folder, and why it is refused.
OTHERS = (
    (("--frames", "17"), "frames 9 -> 17"),
    (("--size", "112x64"), "width 96 -> 112"),
    (("--guidance", "1"), "guidance 6.0 -> 1.0"),
    (("--cache", "deepcache", "--steps", "8"), "step cache none -> deepcache"),
    (("--mesh", "tp=2"), "mesh dp=1,sp=1,tp=1 -> dp=1,sp=1,tp=2"),
    (("--dtype", "bfloat16"), "dtype float32 -> bfloat16"),
    (("--attention", "blockwise"), "attention auto -> blockwise"),
    (("--sharding", "gathered"), "sharding default -> gathered"),
    (("--blocks", "upstream"), "blocks native -> upstream"),
    (("--vae", "flax"), "implementation torchax -> flax"),
    (("--model", "hunyuanvideo"), "model cogvideox -> hunyuanvideo"),
)


@pytest.mark.parametrize(("args", "told"), OTHERS, ids=[told for _, told in OTHERS])
def test_another_request_is_refused_before_anything_is_imported(
    args: tuple[str, ...],
    told: str,
    compiled: Any,
    cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tpuport.cli.commands.generate.shown_session", None)
    ran = cli(
        *("generate", "--prompt", "a panda", *SMALL, "--executables", compiled[1]),
        *args,
    )
    assert ran.code == 1
    assert told in ran.err
    assert ran.err.startswith(f"error: {compiled[1]}: ")
    assert ran.err.count("\n") == 1


def test_a_run_that_goes_on_is_held_against_them_as_early(
    compiled: Any, run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = compiled
    real = built_folder.read_entry

    def other(path: Path) -> Any:
        entry = real(path)
        if entry.key.stage == "encode":
            return entry
        context = {**entry.key.context, "num_frames": 17}
        return replace(entry, key=replace(entry.key, context=context))

    monkeypatch.setattr(built_folder, "read_entry", other)
    monkeypatch.setattr("tpuport.cli.commands.stages.shown_session", None)
    for stage in ("denoise", "decode"):
        ran = cli(stage, "--run-dir", run, "--executables", folder)
        assert ran.code == 1
        assert f"{stage}/" in ran.err
        assert "frames 17 -> 9" in ran.err
        assert ran.err.count("\n") == 1
    # Encode does not run what the others do.
    asked = Settings(executables=folder, height=64, width=96, num_frames=9)
    known = check_early(asked)
    check_run_early(known, asked, ["encode"])
    with pytest.raises(ArtifactError, match="frames 17 -> 9"):
        check_run_early(known, asked)
    # Upstream's code needs none, and a stage op by op compiles nothing.
    for changes in (
        {"backend": Backend.DIFFUSERS, "executables": None},
        {"no_jit": ("denoise", "decode")},
    ):
        other = replace(asked, **changes)
        check_run_early(check_early(other), other)
    # Of a run directory that exists, it is not known yet which stages are left.
    check_run_early(known, replace(asked, run_dir=run))


def test_no_executable_is_read_whole_before_the_session(
    compiled: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(built_folder, "read_payload", None)
    asked = Settings(executables=compiled[1], height=64, width=96, num_frames=9)
    check_run_early(check_early(asked), asked)


def test_what_differs_is_known_before_the_first_stage(
    compiled: Any, cache: Path, tmp_path: Path
) -> None:
    _, made = compiled
    folder = Path(shutil.copytree(made, tmp_path / "copied"))
    content = dict(read_document(folder / MANIFEST, MANIFEST_SCHEMA, "made"))
    content["tiling"]["decode"] |= {"asked": "on", "tiled": True}
    write_document(folder / MANIFEST, MANIFEST_SCHEMA, content)
    for args, told in (
        (("--guidance", "1"), "guidance 6.0 -> 1.0"),
        (("--cache", "deepcache", "--steps", "8"), "step cache none -> deepcache"),
        ((), "tiled -> untiled; use --vae-tiling on"),
    ):
        ran = call(
            *("generate", "--prompt", "a panda", *SMALL, *args),
            *("--executables", folder, "--cache-dir", cache),
            *("--out", tmp_path / "v.mp4"),
        )
        assert ran.code == 1
        assert told in ran.err
        assert "encode: " not in ran.err


def test_a_stage_on_eight_devices(made: Made, run: Path, cli: Cli) -> None:
    mesh = ("--mesh", "dp=2,sp=2,tp=2")
    ran = cli(
        *("compile", *SMALL, *mesh, "--topology", "cpu-8", "--stage", "denoise"),
        *("--out", "eight", "--json"),
    )
    assert ran.code == 0, ran.err
    assert ran.json["stages"] == ["denoise"]
    assert ran.json["mesh"] == "dp=2,sp=2,tp=2"
    ran = cli(
        *("denoise", "--run-dir", run, *mesh, "--executables", "eight", "--json"),
        "--no-compile-cache",
    )
    assert ran.code == 0, ran.err
    report = ran.json["report"]
    assert report["programs"] == {"loaded": 1, "cached": 0, "compiled": 0}
    ran = cli("denoise", "--run-dir", run, "--executables", "eight")
    assert ran.code == 1
    assert "mesh dp=2,sp=2,tp=2 -> dp=1,sp=1,tp=1" in ran.err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--out is missing"),
        (["--out", "x", "--stage", "paint"], "choose one of encode, denoise, decode"),
        (["--out", "x", "--topology", "v6e-7"], "unknown TPU topology 'v6e-7'"),
        (["--out", "x", "--topology", "cpu-0"], "unknown TPU topology 'cpu-0'"),
        (["--out", "x", "--frames", "10"], "nearest valid: 9 or 17"),
        (
            ["--out", "x", "--topology", "v6e-8", "--mesh", "dp=4,tp=4"],
            "needs 16 devices, there are 8",
        ),
    ],
    ids=["out", "stage", "slice", "no devices", "frames", "mesh"],
)
def test_what_cannot_be_compiled_is_refused(
    args: list[str], message: str, cli: Cli
) -> None:
    ran = cli("compile", *args)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert not Path("x").exists()


def test_a_file_in_the_place_of_the_folder(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Said before torch and jax are imported.
    monkeypatch.setattr("tpuport.cli.commands.compile._session", None)
    Path("file").touch()
    ran = cli("compile", *SMALL, "--out", ".")
    assert ran.code == 2
    assert ran.last.startswith("error: --out .: holds file, which `tpuport compile` ")
    ran = cli("compile", *SMALL, "--stage", "encode", "--out", "file")
    assert ran.code == 2
    assert ran.last.startswith("error: --out file: file is not a folder; move it ")
    assert "compil" not in ran.err


# --- for chips that are not there


def process(*args: str | Path, env: dict[str, str] | None = None) -> Any:
    """``tpuport ARGS`` in a process of its own: libtpu is loaded once in each."""
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    ran = run_python(
        ["-m", "tpuport", *map(str, args)],
        environment={**clean, **(env or {})},
        folder=ROOT,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="module")
def absent(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A denoise step for eight chips of a machine that is not there."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed")
    folder = tmp_path_factory.mktemp("absent")
    document = process(
        *("compile", *SMALL, "--topology", "v6e-8", "--mesh", "dp=2,sp=2,tp=2"),
        *("--stage", "denoise", "--out", folder, "--cache-dir", cache, "--json"),
    )
    return document, folder


def test_executables_for_absent_chips(absent: Any) -> None:
    document, folder = absent
    assert document["device_kind"] == "TPU v6 lite"
    (program,) = document["programs"]
    assert program["memory"]["code"] > 0
    entry = read_entry(folder / program["file"])
    key = entry.key
    assert (key.platform, key.chip, key.host) == ("tpu", "TPU v6 lite", "")
    assert key.options["dtype"] == "bfloat16"  # the variant's, as on a TPU
    assert key.mesh == {"dp": 2, "sp": 2, "tp": 2}
    # One machine with eight chips: all of one process, each at its place.
    assert key.devices[0] == "0 of process 0 at (0, 0, 0).0"
    assert key.devices[7] == "7 of process 0 at (1, 3, 0).0"
    assert "libtpu" in key.versions
    # A process without the flags, or with others, compiles again and says so.
    assert {f.text for f in choose_flags("v6e", (), "denoise").applied} <= {*key.flags}
    # Beside it, what jax's own cache would look for on the machine with the chips.
    assert list((folder / "xla").glob("jit_denoise_step-*-cache"))
    assert entry.traced.attention


def test_they_are_refused_by_name_on_this_machine(
    absent: Any, cache: Path, tmp_path: Path
) -> None:
    _, folder = absent
    ran = call(
        *("generate", "--prompt", "a panda", *SMALL, "--mesh", "dp=2,sp=2,tp=2"),
        *("--executables", folder, "--cache-dir", cache, "--out", tmp_path / "v.mp4"),
    )
    assert ran.code == 1
    assert "platform tpu -> cpu" in ran.err
    assert "chip TPU v6 lite -> cpu" in ran.err
