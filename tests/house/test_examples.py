"""The notebooks of examples/ run from top to bottom, on the demo."""

from __future__ import annotations

import base64
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from diffusers import CogVideoXPipeline
from nbclient import NotebookClient

from tests.cli.tools import call
from tests.core.pipelines.lora_files import lora_for, written
from tests.processes import needs_libtpu
from tests.sweeps import sweep
from tpuport.core.files.fingerprint import version
from tpuport.core.files.sealed_json import read_sidecar

ROOT = Path(__file__).resolve().parents[2]
KAGGLE, COLAB = (
    ROOT / "examples" / name for name in ("kaggle_v5e-8.ipynb", "colab_v5e-1.ipynb")
)
MOST_LINES = 10
#: The demo, as small as its autoencoder takes.
VIDEO = "--frames 5 --size 32x32 --steps 2"

each = pytest.mark.parametrize("path", [KAGGLE, COLAB], ids=lambda path: path.stem)


def codes(path: Path) -> dict[str, Any]:
    """The cells with code, by their names."""
    book = nbformat.read(path, as_version=4)
    return {cell["id"]: cell for cell in book.cells if cell.cell_type == "code"}


@each
def test_a_notebook_is_short_and_clean(path: Path) -> None:
    nbformat.validate(json.loads(path.read_text()))
    for name, cell in codes(path).items():
        assert len(cell.source.splitlines()) <= MOST_LINES, name
        assert not cell.outputs, name
        assert cell.execution_count is None, name


@each
def test_a_notebook_installs_the_wheel_of_this_version(path: Path) -> None:
    (wheel,) = re.findall(r"tpuport-([\d.]+)-py3", codes(path)["install"].source)
    assert wheel == version("tpuport")


def test_the_notebooks_differ_in_their_settings_alone() -> None:
    """So what runs in one runs in the other."""
    kaggle, colab = codes(KAGGLE), codes(COLAB)
    del kaggle["settings"], colab["settings"], colab["drive"]
    colab["plan"].source = colab["plan"].source.replace("v5e-1", "v5e-8")
    assert [*kaggle.items()] == [*colab.items()]


@each
def test_the_page_compiles_what_a_notebook_runs(path: Path) -> None:
    settings: dict[str, str] = {}
    exec(codes(path)["settings"].source, settings)
    slice_ = path.stem.split("_")[1]
    asked = f"{settings['MODEL']} {settings['VIDEO']} --topology {slice_}"
    page = (ROOT / "docs/first-tpu.md").read_text()
    assert f"\ntpuport compile {asked} --out first/built\n" in page
    assert f"examples/{path.name}" in page


def lora_of(demo: Path, file: Path) -> Path:
    """A LoRA for the attention of the demo's transformer."""
    pipeline = CogVideoXPipeline.from_pretrained(demo)
    return written(lora_for(pipeline), file, "transformer.")


@needs_libtpu
@pytest.mark.parametrize(
    ("path", "mesh"),
    sweep([(KAGGLE, "dp=2,sp=4")], [(KAGGLE, "dp=2,sp=4"), (COLAB, "dp=1")]),
    ids=lambda value: value.stem if isinstance(value, Path) else "",
)
def test_a_notebook_runs_from_top_to_bottom(
    path: Path,
    mesh: str,
    demo_folder: Path,
    cache_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over a minute: each of four commands is a process that imports torch and jax.

    The programs are made before, as on a laptop, for as many devices as the slice has.
    A cell behind the settings names the demo; nothing else of the notebook changes.
    """
    model = f"--model cogvideox --weights {demo_folder} --mesh {mesh}"
    monkeypatch.setenv("TPUPORT_CACHE_DIR", str(cache_dir))
    call.good("compile", *f"{model} {VIDEO} --out {tmp_path}/files/built".split())
    settings = {
        "FILES": f"{tmp_path}/files",
        "MODEL": model,
        "VIDEO": VIDEO,
        "BUILT": f"--executables {tmp_path}/files/built",
        "LORA": f"{lora_of(demo_folder, tmp_path / 'lora.safetensors')}:0.5",
    }
    book = nbformat.read(path, as_version=4)
    at = [cell["id"] for cell in book.cells].index("settings")
    assert {*settings} <= {*re.findall(r"^(\w+) = ", book.cells[at].source, re.M)}
    lines = "\n".join(f"{name} = {value!r}" for name, value in settings.items())
    book.cells.insert(at + 1, nbformat.v4.new_code_cell(lines))
    for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
    commands = Path(sys.executable).parent
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(book, timeout=1800, kernel_name="python3", resources=where).execute()
    said = {cell["id"]: text_of(cell) for cell in book.cells if "outputs" in cell}
    assert re.search(r"problems +none found", said["doctor"])
    assert said["install"] == ""
    for name, cell in (("fox", "generate"), ("lora", "lora")):
        assert "nothing: 5 programs loaded" in said[cell]
        content = base64.b64encode((tmp_path / f"{name}.mp4").read_bytes()).decode()
        assert f"data:video/mp4;base64,{content}" in said["video"] + said["lora"]
    assert (tmp_path / "fox.mp4").read_bytes() != (tmp_path / "lora.mp4").read_bytes()
    (lora,) = read_sidecar(tmp_path / "lora.mp4.json")["weights"]["loras"]
    assert lora["scale"] == 0.5
    assert f"on {path.stem.split('_')[1]} " in said["plan"]
    assert "denoise: fits" in said["plan"]


def text_of(cell: Any) -> str:
    """What a cell printed and showed."""
    shown = (one.get("data", {}).get("text/html", "") for one in cell.outputs)
    return "".join([*(one.get("text", "") for one in cell.outputs), *shown])
