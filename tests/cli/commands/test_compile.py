"""``tpuport compile``: what it refuses, and programs for chips that are not there."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tools import ASKED, Cli, call
from tests.processes import run_python
from tpuport.cli.asked import environment
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.planning import prepared
from tpuport.core.enums import Place
from tpuport.core.mesh.compiler_flags import choose_flags
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.programs.executable_files import read_entry
from tpuport.core.reports import Reporter

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "--out is missing"),
        (["--out", "x", "--stage", "paint"], "choose one of encode, denoise, decode"),
        (["--out", "x", "--topology", "cpu-0"], "unknown TPU topology 'cpu-0'"),
        (
            ["--out", "x", "--topology", "v6e-8", "--mesh", "dp=4,tp=4"],
            "--mesh dp=4,sp=1,tp=4 needs 16 devices, there are 8",
        ),
        (
            ["--out", "x", "--topology", "cpu-2", "--mesh", "sp=4"],
            "4 devices, there ar",
        ),
        (["--out", "x", "--weights", "./none"], "--weights: weights folder './none' d"),
        (["--out", "."], "--out .: holds file, which `tpuport compile` "),
        (["--out", "file"], "--out file: file is not a folder; move it "),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    args: list[str], message: str, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Said before torch and jax are imported.
    monkeypatch.setattr(environment, "import_libraries", None)
    Path("file").touch()
    ran = cli("compile", *args)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1
    assert not Path("x").exists()


def test_text_encoders_are_left_to_the_host_where_that_is_asked(folder: Path) -> None:
    settings = Settings(weights=folder, encode_on=Place.HOST)
    call = prepared(settings, ["encode"], Reporter())
    assert call.settings.on_host == ("text_encoder",)


@pytest.fixture(scope="module")
def absent(
    cache: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Any, Path]:
    """A denoise step for eight chips of a machine that is not there."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("libtpu, the TPU compiler, is not installed")
    place = tmp_path_factory.mktemp("absent") / "made when missing"
    # A process of its own: libtpu is loaded once in each.
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    asked = ("--weights", folder, *ASKED, "--topology", "v6e-8", "--mesh", "sp=4,tp=2")
    asked = (*asked, "--stage", "denoise", "--out", place, "--cache-dir", cache)
    ran = run_python(
        ["-m", "tpuport", "compile", *map(str, asked), "--json"],
        environment=clean,
        folder=ROOT,
    )
    assert ran.returncode == 0, ran.stderr
    assert f"use them with --executables {place}" in ran.stderr
    return json.loads(ran.stdout), place


def test_executables_for_absent_chips(absent: tuple[Any, Path]) -> None:
    document, folder = absent
    assert (document["topology"], document["stages"]) == ("v6e-8", ["denoise"])
    assert (document["pipeline"], document["dtype"]) == ("WanPipeline", "bfloat16")
    entries = [read_entry(folder / one["file"]) for one in document["programs"]]
    assert (
        sum(one["bytes"] for one in document["programs"]) == (document["program_bytes"])
    )
    (key,) = (e.key for e in entries if e.key.component == "transformer")
    assert (key.platform, key.chip, key.host) == ("tpu", "TPU v6 lite", "")
    assert key.mesh == {"dp": 1, "sp": 4, "tp": 2}
    # One machine with eight chips: all of one process, each at its place.
    assert key.devices[0] == "0 of process 0 at (0, 0, 0).0"
    assert key.devices[7] == "7 of process 0 at (1, 3, 0).0"
    assert "libtpu" in key.versions
    # A process without the flags, or with others, compiles again and says so.
    assert {f.text for f in choose_flags("v6e", (), "denoise").applied} <= {*key.flags}


def test_they_are_refused_by_name_on_this_machine(
    absent: tuple[Any, Path],
    folder: Path,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetched(self: Any, reporter: Reporter, *, weights: bool = True) -> Any:
        assert not weights, "weights were fetched"
        return self

    monkeypatch.setattr(PipelineFolder, "fetched", fetched)
    ran = call(
        *("generate", "--weights", folder, *ASKED, "--mesh", "sp=4,tp=2"),
        *("--executables", absent[1], "--dtype", "bfloat16"),
        *("--cache-dir", cache, "--out", tmp_path / "v.mp4"),
    )
    assert ran.code == 1
    lines = ran.err.splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.startswith("error: "))
    assert f"{absent[1]} is not for this run: {len(lines) - at - 1} diff" in lines[at]
    assert lines[at + 1 : at + 3] == [
        "  platform tpu -> cpu",
        "  chip TPU v6 lite -> cpu",
    ]
    assert "loading" not in ran.err
