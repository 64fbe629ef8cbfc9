"""A folder of executables, made without running anything and used by another session.

The devices here stand in for those of the machine with the chips: the same code makes
and reads the folder, and only the executables' loader is another.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tpuport
from tests.core.heard import Heard, installed_toy
from tpuport.core.files.sealed_json import write_document
from tpuport.core.plan.abstract_programs import abstract_programs
from tpuport.core.plan.build_ahead import CompileError, build
from tpuport.core.programs import built_folder
from tpuport.core.programs import executable_files as executables
from tpuport.core.programs.built_folder import (
    BuiltFolder,
    write_manifest,
)
from tpuport.core.programs.components import Components
from tpuport.core.programs.executable_files import read_entry
from tpuport.core.programs.folder_place import (
    MANIFEST,
    MANIFEST_SCHEMA,
    check_place,
)
from tpuport.core.reports import bytes_text
from tpuport.core.run import executor as executors
from tpuport.core.spec.step_cache import StepCache
from tpuport.core.spec.tiling import TilingDecision
from tpuport.errors import ArtifactError, UsageError

ASKED: dict[str, Any] = {"prompt": ["a cat", "a dog"], "seed": [1, 2]}
MESH = "dp=2,tp=4"
STAGES = ("encode", "denoise", "decode")


@pytest.fixture(autouse=True, scope="module")
def _toy() -> Iterator[None]:
    with installed_toy():
        yield


def compile_into(
    folder: Path, cache: Path, stages: tuple[str, ...] = STAGES, **changes: Any
) -> list[Any]:
    """What ``tpuport compile`` does, without its options."""
    asked = {**ASKED, **changes}
    with tpuport.load("toy", mesh=MESH, cache_dir=cache) as session:
        request = session.request(prompt=asked.pop("prompt"), **asked)
        made, _ = build(
            lambda decided: abstract_programs(
                session.components, request, session.settings, stages=stages
            ),
            session.components,
            request,
            folder,
            attached=True,
            reporter=Heard(),
        )
    write_manifest(folder, [b.entry for b in made], stages, {"model": "toy"})
    return made


def use(folder: Path, cache: Path, heard: Heard | None = None, **kwargs: Any) -> Any:
    changes = {key: kwargs.pop(key) for key in ("num_frames",) if key in kwargs}
    options = {"mesh": MESH, "cache_dir": cache, "compile_cache": False, **kwargs}
    with tpuport.load(
        "toy", executables=folder, reporter=heard or Heard(), **options
    ) as session:
        return session.generate(**ASKED, **changes)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("made") / "executables"
    compile_into(folder, cache_dir)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy, as on another machine, to be damaged."""
    return Path(shutil.copytree(made, tmp_path / "copied"))


@pytest.fixture(scope="module")
def expected(cache_dir: Path) -> Any:
    with tpuport.load(
        "toy", mesh=MESH, cache_dir=cache_dir, compile_cache=False
    ) as session:
        return session.generate(**ASKED)


def test_what_was_compiled_before_is_what_runs(
    folder: Path, cache_dir: Path, expected: Any
) -> None:
    jax.clear_caches()
    heard = Heard()
    result = use(folder, cache_dir, heard)
    np.testing.assert_array_equal(result.frames, expected.frames)
    np.testing.assert_array_equal(result.latents, expected.latents)
    assert result.report.warm
    assert result.report.programs == {"loaded": 3, "cached": 0, "compiled": 0}
    assert heard.about("compil") == []
    made = [c for s in result.report.stages for c in s.compiles]
    assert all(Path(c.executable).parent == folder for c in made)
    for ours, theirs in zip(result.report.stages, expected.report.stages, strict=True):
        assert ours.attention == theirs.attention
        assert ours.patches == theirs.patches


def test_a_second_compile_reuses_what_is_there(made: Path, cache_dir: Path) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in made.glob("*.executable")}
    again = compile_into(made, cache_dir)
    assert [b.reused for b in again] == [True] * 3
    assert [b.calls for b in again] == [1, 3, 1]
    after = {p.name: p.stat().st_mtime_ns for p in made.glob("*.executable")}
    assert after == before


def test_what_the_manifest_no_longer_names_is_removed(
    folder: Path, cache_dir: Path
) -> None:
    first = {path.name for path in folder.glob("*.executable")}
    compile_into(folder, cache_dir, num_frames=9)
    second = {path.name for path in folder.glob("*.executable")}
    # Encode has the shapes it had.
    assert len(second) == 3
    assert len(first & second) == 1
    assert BuiltFolder.open(folder).stages == STAGES


#: How a session differs from the one the folder was made for, and what is said.
OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mesh": ({"mesh": "dp=2,tp=2"}, ["mesh dp=2,sp=1,tp=4 -> dp=2,sp=1,tp=2"]),
    "dtype": ({"dtype": "bfloat16"}, ["dtype float32 -> bfloat16"]),
    "attention": ({"attention": "blockwise"}, ["attention auto -> blockwise"]),
    "frames": ({"num_frames": 9}, ["frames 5 -> 9"]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused_by_name_before_anything_is_loaded(
    name: str, folder: Path, cache_dir: Path
) -> None:
    options, words = OTHERS[name]
    heard = Heard()
    with pytest.raises(ArtifactError) as caught:
        use(folder, cache_dir, heard, **options)
    message = str(caught.value)
    for text in (str(folder), *words, "tpuport compile"):
        assert text in message
    assert heard.about("compiling") == []


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("source", {"tpuport": "0"}, "tpuport source changed"),
        ("versions", {"jaxlib": "0.9.0"}, "jaxlib 0.9.0 -> "),
        ("chip", "TPU v6 lite", "chip TPU v6 lite -> cpu"),
        ("platform", "tpu", "platform tpu -> cpu"),
        ("host", "another processor", "processor another processor -> "),
        ("flags", ("--xla_old=1",), "compiler flag --xla_old=1 is not set now"),
        ("config", {"heads": 99}, "heads 99 -> "),
        ("model", "other", "model other -> toy"),
    ],
)
def test_each_input_of_the_key_is_refused_by_its_name(
    field: str,
    value: Any,
    words: str,
    folder: Path,
    cache_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = executables.read_entry

    def other(path: Path) -> Any:
        entry = real(path)
        if entry.key.stage != "denoise":
            return entry
        now = getattr(entry.key, field)
        changed = {**now, **value} if isinstance(value, dict) else value
        return replace(entry, key=replace(entry.key, **{field: changed}))

    monkeypatch.setattr(built_folder, "read_entry", other)
    monkeypatch.setattr(built_folder, "read_payload", lambda entry: b"")
    with pytest.raises(ArtifactError) as caught:
        use(folder, cache_dir)
    assert words in str(caught.value)
    assert "denoise/step" in str(caught.value)


def flip(path: Path) -> None:
    """Another byte in the middle."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "manifest.json").unlink(), "manifest.json: is missing"),
        (lambda f: (f / "manifest.json").write_text("{"), "is not JSON"),
        (lambda f: next(f.glob("denoise*")).unlink(), "executable: is missing"),
        (lambda f: next(f.glob("denoise*")).write_bytes(b""), "no executable"),
        (lambda f: flip(next(f.glob("denoise*"))), "Bad CRC-32"),
    ],
    ids=["no manifest", "bad manifest", "no file", "empty file", "bad byte"],
)
def test_a_damaged_folder_is_refused_by_name(
    damage: Any, message: str, folder: Path, cache_dir: Path
) -> None:
    damage(folder)
    with pytest.raises(ArtifactError, match=message) as caught:
        use(folder, cache_dir)
    assert str(folder) in str(caught.value)


def test_a_stage_that_was_not_compiled_is_compiled_visibly(
    tmp_path: Path, cache_dir: Path, expected: Any
) -> None:
    compile_into(tmp_path, cache_dir, stages=("denoise",))
    heard = Heard()
    result = use(tmp_path, cache_dir, heard)
    assert f"{tmp_path}: decode was not compiled into it" in heard.lines
    assert heard.about("compiling") == ["compiling encode/run", "compiling decode/run"]
    assert result.report.programs == {"loaded": 1, "cached": 0, "compiled": 2}
    np.testing.assert_array_equal(result.frames, expected.frames)


def test_an_executable_that_jax_refuses_is_compiled_with_the_folders_cache(
    folder: Path, cache_dir: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> Any:
        raise RuntimeError("UNIMPLEMENTED")

    monkeypatch.setattr(executables, "load", refuse)
    heard = Heard()
    first = use(folder, cache_dir, heard)
    assert len(heard.about("jax cannot load it (RuntimeError: UNIMPLEMENTED)")) == 3
    assert first.report.programs == {"loaded": 0, "cached": 0, "compiled": 3}
    assert list((folder / "xla").glob("jit_denoise_step-*-cache"))
    # An entry of jax's own cache in the folder spares the compile.
    second = use(folder, cache_dir)
    assert second.report.programs == {"loaded": 0, "cached": 3, "compiled": 0}
    np.testing.assert_array_equal(second.frames, expected.frames)


def test_the_files_are_of_every_program(folder: Path) -> None:
    entries = [read_entry(path) for path in folder.glob("*.executable")]
    assert {entry.key.name for entry in entries} == {
        "encode/run",
        "denoise/step",
        "decode/run",
    }
    # Nothing of jax's own cache is needed where the devices were there.
    assert not (folder / "xla").exists()


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return found


def test_stages_may_be_built_one_after_the_other(
    tmp_path: Path, cache_dir: Path, expected: Any
) -> None:
    folder = tmp_path / "built"
    for stage in STAGES:
        compile_into(folder, cache_dir, (stage,))
    assert sorted(manifest(folder)["stages"]) == sorted(STAGES)
    result = use(folder, cache_dir)
    np.testing.assert_array_equal(result.frames, expected.frames)
    assert result.report.programs == {"loaded": 3, "cached": 0, "compiled": 0}


def test_stages_of_other_settings_go_and_it_is_said(
    tmp_path: Path, cache_dir: Path
) -> None:
    folder, said = tmp_path / "built", []
    compile_into(folder, cache_dir, ("denoise",))
    files = {p["file"] for p in manifest(folder)["programs"]}
    write_manifest(folder, [], ("decode",), {"model": "another"}, said.append)
    assert manifest(folder)["stages"] == ["decode"]
    assert files
    assert not any((folder / name).exists() for name in files)
    assert said == [f"{folder}: what it held of denoise had other settings: removed"]


def built_with(folder: Path, cache: Path, limit: int, *, smaller: bool) -> Any:
    """Build the toy as if its decode had a choice of tiles.

    Args:
        limit: bytes of a device.
        smaller: whether tiles take less.
    """
    heard = Heard()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executors, "program_room", lambda *args: limit)
        with tpuport.load("toy", mesh="dp=1,tp=4", cache_dir=cache) as session:
            *others, decode = session.port.stages

            def plan(context: Any) -> Any:
                short = smaller and context.vae_tiling == "on"
                frames = context.request.num_frames
                if short:
                    context = replace(
                        context, request=replace(context.request, num_frames=5)
                    )
                    latents = context.inputs["latents"]
                    size = latents.shape[1] * 5 // frames
                    context = replace(context, inputs={"latents": latents[:, :size]})
                return decode.plan(context)

            tiled = replace(decode, plan=plan, tiles=lambda context: "2 x 3 tiles")
            port = replace(session.port, stages=(*others, tiled))
            request = session.request(prompt="a cat", num_frames=33)
            made, decided = build(
                lambda decided: abstract_programs(
                    Components(
                        port, session.checkpoint, session.mesh, session.settings
                    ),
                    request,
                    session.settings,
                    stages=STAGES,
                    decided=decided,
                    reporter=heard,
                ),
                session.components,
                request,
                folder,
                attached=True,
                reporter=heard,
            )
    return made, decided, heard.lines


def needed(folder: Path, stage: str) -> int:
    (found,) = folder.glob(f"{stage}*.executable")
    size = read_entry(found).needed
    assert size is not None
    return size


def test_a_stage_that_compiles_to_too_much_is_compiled_in_tiles(
    tmp_path: Path, cache_dir: Path
) -> None:
    made, (decided,), _ = built_with(tmp_path / "all", cache_dir, 2**40, smaller=True)
    assert (decided.tiled, decided.fits) == (False, True)
    whole = needed(tmp_path / "all", "decode")
    assert decided.needed == whole
    folder = tmp_path / "tight"
    made, (decided,), said = built_with(folder, cache_dir, whole - 1, smaller=True)
    # What was compiled before it stays, and its own first form is gone.
    assert [b.entry.key.stage for b in made] == list(STAGES)
    assert sorted(p.name for p in folder.glob("*.executable")) == sorted(
        b.entry.path.name for b in made
    )
    assert (decided.asked, decided.tiled, decided.fits) == ("auto", True, True)
    assert decided.untiled == whole
    assert decided.needed == needed(folder, "decode") < whole
    assert decided.line().endswith(f"(untiled {bytes_text(whole)})")
    assert len([line for line in said if line.endswith("on in 2 x 3 tiles")]) == 1


def test_a_stage_that_fits_in_no_form_is_not_compiled(
    tmp_path: Path, cache_dir: Path
) -> None:
    with pytest.raises(CompileError, match="use a smaller size, fewer frames or more"):
        built_with(tmp_path, cache_dir, 1, smaller=False)
    assert list(tmp_path.glob("decode*")) == []
    assert len(list(tmp_path.glob("*.executable"))) == 2


def test_the_form_of_a_folder_is_taken_or_refused(
    folder: Path, cache_dir: Path
) -> None:
    tiled = TilingDecision(stage="decode", asked="auto", tiles="2 tiles", tiled=True)
    document = BuiltFolder.open(folder).manifest
    assert BuiltFolder.open(folder).tiling("decode") is None
    content = {**document, "tiling": {"decode": tiled.as_dict()}}
    write_document(folder / MANIFEST, MANIFEST_SCHEMA, content)
    built = BuiltFolder.open(folder)
    with tpuport.load(
        "toy", mesh=MESH, cache_dir=cache_dir, executables=folder
    ) as session:
        request = session.request(prompt=ASKED["prompt"], seed=ASKED["seed"])
        stage = replace(session.port.stage("decode"), tiles=lambda context: "2 tiles")
        found = session.executor.tiling(stage, request)
        assert found is not None
        assert (found.tiled, found.given) == (True, True)
        built.check_request(request, session.port, STAGES, [found])
        asked = session.executor.tiling(stage, request, "off")
        assert asked is not None
        assert (asked.tiled, asked.given) == (False, False)
        with pytest.raises(ArtifactError) as caught:
            built.check_request(request, session.port, STAGES, [asked])
    assert "decode is not for this run" in str(caught.value)
    assert "tiled -> untiled; use --vae-tiling on, " in str(caught.value)


def test_what_only_another_stage_needs_is_not_compared(
    folder: Path, cache_dir: Path
) -> None:
    """Decode alone may use a folder whose denoising is of another step cache."""
    built = BuiltFolder.open(folder)
    with tpuport.load("toy", mesh=MESH, cache_dir=cache_dir) as session:
        request = session.request(prompt=ASKED["prompt"], seed=ASKED["seed"])
        cached = replace(request, step_cache=StepCache(method="deepcache"))
        built.check_request(cached, session.port, ["encode", "decode"])
        with pytest.raises(ArtifactError, match="step cache none -> deepcache"):
            built.check_request(cached, session.port, ["denoise"])
        longer = replace(request, num_frames=9)
        with pytest.raises(ArtifactError, match="frames 5 -> 9"):
            built.check_request(longer, session.port, ["decode"])


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
