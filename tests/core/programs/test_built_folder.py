"""A folder of executables, made without running anything and used by another port.

The devices here stand in for those of the machine with the chips: the same code makes
and reads the folder, and only the executables' loader is another.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import torch

import tpuport
from tests.core.heard import Heard
from tests.pipelines.example import all_examples, made
from tpuport import targets
from tpuport.core import compat
from tpuport.core.drive.rehearsal import Rehearsal, rehearse
from tpuport.core.enums import WeightsOn
from tpuport.core.files.fingerprint import version
from tpuport.core.files.sealed_json import write_document
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.plan import building
from tpuport.core.plan.building import Built, CompileError, build_pipeline
from tpuport.core.programs import built_folder
from tpuport.core.programs.built_folder import BuiltFolder, write_manifest
from tpuport.core.programs.folder_place import MANIFEST, MANIFEST_SCHEMA, check_place
from tpuport.core.reports import Reporter
from tpuport.core.seam.ported import seam_of
from tpuport.core.seam.target import Target
from tpuport.core.spec.run_settings import RunSettings
from tpuport.errors import ArtifactError, MissingArtifactError, UsageError

NAME, MESH = "WanPipeline", "sp=2"
ABOUT = {"pipeline": NAME, "topology": "here"}
STAGES = ("encode", "denoise", "decode")


def pipeline_of() -> tuple[Any, dict[str, Any]]:
    pipeline, call = made(all_examples()[NAME])
    return pipeline, {**call, "output_type": "latent"}


def target(mesh: str = MESH) -> Target:
    placed = targets.place_for_port(MeshSpec.parse(mesh))
    return targets.claimed_target(NAME, placed, RunSettings(), Reporter())


def rehearsed(mesh: str = MESH) -> Rehearsal:
    pipeline, call = pipeline_of()
    return rehearse(pipeline, target(mesh), call, Reporter())


def compile_into(folder: Path, stages: tuple[str, ...] = STAGES) -> list[Built]:
    """What ``tpuport compile`` does, without its options."""
    built = build_pipeline(
        rehearsed(), stages, folder, attached=True, reporter=Reporter()
    )
    about = ABOUT | targets.made_with(target(), RunSettings())
    write_manifest(folder, [one.entry for one in built], about)
    return built


def run(heard: Heard | None = None, **how: Any) -> tuple[torch.Tensor, list[bool]]:
    """The latents, and of each program whether it was loaded."""
    pipeline, call = pipeline_of()
    pipeline = tpuport.port(
        pipeline, reporter=heard or Heard(), **{"mesh": MESH, **how}
    )
    frames = pipeline(**call, generator=torch.Generator().manual_seed(5)).frames
    calls = seam_of(pipeline).journal.calls
    loaded = [one.compiled.loaded for one in calls if one.compiled is not None]
    return frames, loaded


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "executables"
    compile_into(folder)
    return folder


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy, as on another machine, to be damaged."""
    return Path(shutil.copytree(whole, tmp_path / "copied"))


def executables(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.executable"))


def test_what_was_compiled_before_is_what_runs(folder: Path) -> None:
    expected, compiled = run()
    assert not any(compiled)
    jax.clear_caches()
    heard = Heard()
    found, loaded = run(heard, executables=folder)
    assert torch.equal(found, expected)
    assert loaded
    assert all(loaded)
    assert heard.about("was not there") == heard.about("compiling") == []


def test_a_second_compile_reuses_what_is_there(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in executables(whole)}
    again = compile_into(whole)
    assert all(one.reused for one in again)
    assert {path: path.stat().st_mtime_ns for path in executables(whole)} == before


def test_stages_are_compiled_one_by_one_and_others_stay(
    whole: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "in stages"
    encoded = compile_into(folder, ("encode",))
    assert {one.entry.key.component for one in encoded} == {"text_encoder"}
    compile_into(folder, ("denoise",))
    names = [path.name for path in executables(folder)]
    assert names == [path.name for path in executables(whole)]
    assert len(BuiltFolder.open(folder, Reporter()).entries) == len(names)
    # Of other settings, what was there of other components goes, and is told.
    said: list[str] = []
    entries = [one.entry for one in encoded]
    write_manifest(folder, entries, {**ABOUT, "topology": "there"}, said.append)
    assert len(executables(folder)) == len(encoded)
    assert "transformer" in said[0]
    assert said[0].endswith("had other settings: removed")


@pytest.mark.parametrize(
    ("name", "how", "config", "words"),
    [
        (NAME, {"mesh": "sp=4"}, {}, "mesh dp=1,sp=2,tp=1 -> dp=1,sp=4,tp=1"),
        (NAME, {"attention": "blockwise"}, {}, "attention auto -> blockwise"),
        (NAME, {"blocks": "upstream"}, {}, "blocks native -> upstream"),
        (NAME, {}, {"eps": 0.125}, " -> 0.125"),
        ("CogVideoXPipeline", {}, {}, f"pipeline {NAME} -> CogVideoXPipeline"),
    ],
    ids=["mesh", "attention", "blocks", "config", "pipeline"],
)
def test_another_run_is_refused_by_name_before_anything_is_loaded(
    name: str,
    how: dict[str, str],
    config: dict[str, float],
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*args: Any) -> None:
        raise AssertionError("an executable was loaded")

    monkeypatch.setattr(built_folder, "load", load)
    pipeline, _ = made(all_examples()[name])
    pipeline.transformer.register_to_config(**config)
    with pytest.raises(ArtifactError, match="is not for this run") as caught:
        tpuport.port(pipeline, **{"mesh": MESH, **how}, executables=folder)
    assert any(words in note for note in caught.value.__notes__)
    assert "compile again with `tpuport compile`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_differences_are_told_at_once_in_a_line_each(folder: Path) -> None:
    found = BuiltFolder.open(folder, Reporter())
    entries = [
        replace(
            entry,
            key=replace(
                entry.key,
                chip="TPU v5 lite",
                versions={**entry.key.versions, "jax": "0.9.1"},
                flags=("--xla_a=1",),
            ),
        )
        for entry in found.entries
    ]
    versions = {**found.manifest["versions"], "jax": "0.9.1", "diffusers": "0.41"}
    other = replace(
        found,
        entries=tuple(entries),
        manifest={**found.manifest, "versions": {**versions, "python": "3.99.1"}},
    )
    mesh = targets.place_for_port(MeshSpec.parse("sp=4")).mesh
    flags = dict.fromkeys(compat.compiler_flags())  # test processes have them twice
    with pytest.raises(ArtifactError) as caught:
        other.check(mesh, WeightsOn.HOST, pipeline=NAME, attention="blockwise")
    assert caught.value.__notes__ == [
        "  attention auto -> blockwise",
        "  weights on the chip -> in the host's memory (--weights-on)",
        "  chip TPU v5 lite -> cpu",
        "  mesh dp=1,sp=2,tp=1 -> dp=1,sp=4,tp=1",
        f"  jax 0.9.1 -> {jax.__version__}",
        "  compiler flag --xla_a=1 is not set now",
        *[f"  compiler flag {flag} is set now" for flag in flags],
        f"  diffusers 0.41 -> {version('diffusers')}",
    ]


def test_what_streams_in_the_executables_streams_in_the_run(folder: Path) -> None:
    """Whoever compiled ahead found what does not fit; the run need not find out."""
    found = BuiltFolder.open(folder, Reporter())
    assert target().with_executables(found).streamed == frozenset()
    entries = []
    for entry in found.entries:
        texts = {n: f"{t} on the host" for n, t in entry.key.weights.items()}
        waits = texts if entry.key.component == "transformer" else entry.key.weights
        entries.append(replace(entry, key=replace(entry.key, weights=waits)))
    there = target().with_executables(replace(found, entries=tuple(entries)))
    assert there.streamed == {"transformer"}
    assert there.built is not None


def test_a_program_that_is_not_there_is_compiled_and_named(folder: Path) -> None:
    pipeline, call = pipeline_of()
    heard = Heard()
    pipeline = tpuport.port(pipeline, mesh=MESH, executables=folder, reporter=heard)
    pipeline(**{**call, "height": call.get("height", 16) * 2})
    assert any(": compiled" in line for line in heard.about("was not there"))
    assert heard.about("compiling transformer/")


def test_an_executable_that_jax_refuses_is_compiled_by_its_cache(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("another libtpu")

    monkeypatch.setattr(built_folder, "load", refuse)
    heard = Heard()
    _, loaded = run(heard, executables=folder)
    assert not any(loaded)
    assert heard.about("jax cannot load it (RuntimeError: another libtpu)")


@pytest.mark.parametrize("damage", ["missing", "cut", "manifest", "folder"])
def test_a_damaged_folder_is_one_line(damage: str, folder: Path) -> None:
    first = executables(folder)[0]
    if damage == "missing":
        first.unlink()
    elif damage == "cut":
        first.write_bytes(first.read_bytes()[:50])
    elif damage == "manifest":
        write_document(folder / MANIFEST, MANIFEST_SCHEMA, {"programs": [1]})
    else:
        shutil.rmtree(folder)
    kind = MissingArtifactError if damage == "folder" else ArtifactError
    with pytest.raises(kind) as caught:
        BuiltFolder.open(folder, Reporter())
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)


def test_an_executable_of_another_program_under_a_name_is_refused(folder: Path) -> None:
    found = BuiltFolder.open(folder, Reporter())
    other = replace(found.entries[0].key, chip="other")
    with pytest.raises(ArtifactError, match=f"{other.name} is not for this") as caught:
        found.find(other)
    assert caught.value.__notes__ == ["  chip cpu -> other"]


def test_what_cannot_be_kept_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise building.NotSerialisable("it calls lapack_...")

    monkeypatch.setattr(building, "serialise", refuse)
    with pytest.raises(CompileError, match="cannot be kept: it calls lapack_"):
        compile_into(tmp_path / "made")


@pytest.mark.parametrize(
    ("name", "content", "mine"),
    [
        ("manifest.json", '{"mine": 1}', True),
        ("frame-00000.png", "", True),
        ("step-0123.executable", "", False),
        ("manifest.json", f'{{"schema": "{MANIFEST_SCHEMA}"', False),
    ],
)
def test_a_folder_with_files_of_others_is_refused(
    tmp_path: Path, name: str, content: str, mine: bool
) -> None:
    check_place(tmp_path / "new")
    (tmp_path / name).write_text(content)
    if not mine:
        check_place(tmp_path)
        return
    with pytest.raises(UsageError, match=f"holds {name}, which"):
        check_place(tmp_path)
