"""A second start compiles nothing and says so; a recompile says what changed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import tpuport
from tests.core.programs.test_program_key import KEY
from tests.core.spec.toys import EXAMPLE, Heard, installed_toy
from tests.processes import run_python
from tpuport.core.programs import executable_files as executables
from tpuport.core.programs import program_store as programs
from tpuport.core.programs.executable_files import ExecutableStore, NotSerialisable
from tpuport.core.reports import StageReport
from tpuport.core.run.result import Result

ROOT = Path(__file__).parents[3]
ASKED: dict[str, Any] = {"prompt": ["a cat", "a dog"], "seed": [1, 2]}


@pytest.fixture(autouse=True, scope="module")
def _toy() -> Iterator[None]:
    with installed_toy():
        yield


def make(cache: Path, asked: dict[str, Any] = ASKED, **kwargs: Any) -> tuple[Any, Any]:
    """A whole run in a session of its own: the result, and what was said."""
    heard = Heard()
    options = {"mesh": "dp=2,tp=4", "cache_dir": cache, **kwargs}
    with tpuport.load("toy", reporter=heard, **options) as session:
        return session.generate(**asked), heard


def made_ready(result: Result) -> list[Any]:
    return [c for stage in result.report.stages for c in stage.compiles]


#: torchax makes a random key for every environment, with two tiny programs of jax's.
OF_TORCHAX = ("stage", "_threefry_seed", "jit(stage)", "jit(_threefry_seed)")


class Events:
    """The programs that jax traces and compiles in a block, torchax's own left out."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, event: str, duration: float, **kwargs: Any) -> None:
        name = kwargs.get("fun_name", "")
        if event.startswith("/jax/core/compile/") and name not in OF_TORCHAX:
            self.seen.append(f"{event} {name}")

    def __enter__(self) -> Events:
        jax.monitoring.register_event_duration_secs_listener(self)
        return self

    def __exit__(self, *error: Any) -> None:
        jax.monitoring.unregister_event_duration_listener(self)


def test_a_warm_start_traces_and_compiles_nothing(tmp_path: Path) -> None:
    cold, _ = make(tmp_path)
    jax.clear_caches()
    with Events() as events:
        warm, heard = make(tmp_path)
    assert events.seen == []
    assert [c.loaded for c in made_ready(cold)] == [False] * 3
    assert [c.loaded for c in made_ready(warm)] == [True] * 3
    assert heard.about("compil") == []
    np.testing.assert_array_equal(warm.frames, cold.frames)
    np.testing.assert_array_equal(warm.latents, cold.latents)
    assert (cold.report.warm, warm.report.warm) == (False, True)
    assert warm.report.programs == {"loaded": 3, "cached": 0, "compiled": 0}
    assert cold.report.programs == {"loaded": 0, "cached": 0, "compiled": 3}
    assert dict(warm.report.summary())["compiled"] == "nothing: 3 programs loaded"
    assert warm.report.as_dict()["warm"] is True
    for before, after in zip(cold.report.stages, warm.report.stages, strict=True):
        # What tracing tells is told without tracing.
        assert after.attention == before.attention
        assert after.patches == before.patches
    assert warm.report.stages[1].attention


PROCESS = """
import json, sys
sys.path.insert(0, {example!r})
from importlib import metadata
from tpuport import hookspecs, plugins
found = plugins.load_plugins(
    [metadata.EntryPoint("toy", "toy_stages", hookspecs.GROUP)]
)
plugins.installed_plugins = lambda: found
import jax, tpuport
seen = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, duration, **kw: seen.append((event, kw.get("fun_name", "")))
)
with tpuport.load("toy", mesh="dp=2,tp=4", cache_dir=sys.argv[1]) as session:
    made = session.generate(["a cat", "a dog"], seed=[1, 2])
compiles = [
    (event, name)
    for event, name in seen
    if event.startswith("/jax/core/compile/") and name not in {of_torchax!r}
]
latents = made.latents.numpy().tobytes().hex()
print(json.dumps([made.report.as_dict(), len(compiles), latents]))
"""


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    script = PROCESS.format(example=str(EXAMPLE), of_torchax=OF_TORCHAX)

    def process() -> Any:
        ran = run_python(
            ["-c", script, str(tmp_path)],
            environment=os.environ,
            folder=ROOT,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    cold, compiled, latents = process()
    warm, compiled_again, latents_again = process()
    assert compiled > 0
    assert compiled_again == 0
    assert latents_again == latents
    assert cold["programs"]["compiled"] == 3
    assert warm["programs"] == {"loaded": 3, "cached": 0, "compiled": 0}
    assert warm["warm"]


CHANGED: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[str]]] = {
    "frames": (
        {**ASKED, "num_frames": 9},
        {},
        "denoise/step",
        ["frames 5 -> 9", "carry float32[2, 5, 8, 8, 8] -> float32[2, 9, 8, 8, 8]"],
    ),
    "mesh": (
        ASKED,
        {"mesh": "dp=2,tp=2"},
        "denoise/step",
        ["mesh dp=2,sp=1,tp=4 -> dp=2,sp=1,tp=2"],
    ),
    "attention": (
        ASKED,
        {"attention": "reference"},
        "denoise/step",
        ["attention auto -> reference"],
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_recompile_says_what_changed(name: str, tmp_path: Path) -> None:
    make(tmp_path)
    asked, options, program, words = CHANGED[name]
    result, heard = make(tmp_path, asked, **options)
    (report,) = [c for c in made_ready(result) if f"{c.stage}/{c.program}" == program]
    assert not report.loaded
    (line,) = heard.about(f"recompiling {program}")
    for text in words:
        assert text in line
        assert any(text in reason for reason in report.reasons)


def test_a_change_of_the_source_is_named_and_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, heard = make(tmp_path)
    assert heard.about("recompiling") == []
    monkeypatch.setattr(
        "tpuport.core.programs.program_key.source_hash",
        lambda package: f"new {package}",
    )
    result, heard = make(tmp_path)
    (line,) = heard.about("recompiling denoise/step")
    assert line.endswith(
        "tpuport source changed; toy_stages source changed; toy_upstream source changed"
    )
    assert result.report.programs == {"loaded": 0, "cached": 0, "compiled": 3}
    np.testing.assert_array_equal(result.frames, first.frames)
    again, _ = make(tmp_path)
    assert again.report.warm
    np.testing.assert_array_equal(again.frames, first.frames)


@pytest.mark.parametrize("damage", ["short", "byte", "jax"])
def test_what_cannot_be_loaded_is_compiled_again_visibly(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, _ = make(tmp_path)
    folder = tmp_path / "compiled" / programs.FOLDER
    (file,) = folder.glob("denoise_step-*")
    raw = file.read_bytes()
    if damage == "short":
        file.write_bytes(raw[:-100])
    elif damage == "byte":
        file.write_bytes(raw[:-9] + bytes([raw[-9] ^ 1]) + raw[-8:])
    else:
        real = executables.load

        def refuse(entry: Any, *args: Any) -> Any:
            if entry.path == file:
                raise RuntimeError("UNIMPLEMENTED: not on this backend")
            return real(entry, *args)

        monkeypatch.setattr(executables, "load", refuse)
    second, heard = make(tmp_path)
    (line,) = heard.about(str(file))[:1]
    assert "cannot load it" in line or "compiling denoise/step again" in line
    assert "compiling denoise/step" in heard.lines
    np.testing.assert_array_equal(second.frames, first.frames)
    assert [c.loaded for c in made_ready(second)] == [True, False, True]
    third, heard = make(tmp_path)
    np.testing.assert_array_equal(third.frames, first.frames)
    if damage == "jax":
        # It is said each time, and jax's own cache spares the compile from now on.
        assert heard.about("going on with jax's own cache")
        assert third.report.programs == {"loaded": 2, "cached": 1, "compiled": 0}
    else:
        assert third.report.warm
        assert not heard.about("denoise_step")


def test_what_cannot_be_kept_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> bytes:
        raise NotSerialisable("this backend cannot")

    monkeypatch.setattr(executables, "serialise", refuse)
    first, heard = make(tmp_path)
    assert heard.about("denoise/step is not kept: this backend cannot")
    assert first.report.programs["compiled"] == 3
    second, _ = make(tmp_path)
    assert second.report.programs == {"loaded": 0, "cached": 0, "compiled": 3}
    np.testing.assert_array_equal(second.frames, first.frames)
    assert not list(tmp_path.rglob("*.executable"))


def test_a_program_is_kept_once(tmp_path: Path) -> None:
    make(tmp_path)
    assert len(list((tmp_path / "compiled" / "executables").iterdir())) == 3
    assert not list((tmp_path / "compiled").rglob("*denoise_step-*-cache"))


def test_nothing_is_kept_without_a_compile_cache(tmp_path: Path) -> None:
    for _ in range(2):
        result, _ = make(tmp_path, compile_cache=False)
        assert result.report.programs["compiled"] == 3
    assert not (tmp_path / "compiled").exists()


def test_a_session_makes_a_program_ready_once(tmp_path: Path) -> None:
    with tpuport.load("toy", mesh="dp=2,tp=4", cache_dir=tmp_path) as session:
        first = session.generate(**ASKED)
        again = session.generate(**ASKED)
    assert [c.program for c in made_ready(again)] == []
    assert not again.report.warm
    for before, after in zip(first.report.stages, again.report.stages, strict=True):
        assert after.attention == before.attention


def test_concurrent_runs_share_a_folder(tmp_path: Path) -> None:
    store = ExecutableStore(tmp_path)

    def keep(turn: int) -> bytes:
        payload = bytes([turn]) * 100_000
        store.write(KEY, payload, executables.Traced())
        entry = store.find(KEY)
        assert entry is not None
        return executables.read_payload(entry)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(keep, range(64)))
    # Whoever wrote last, what is read is whole: one writer's bytes.
    assert all(len(set(payload)) == 1 and len(payload) == 100_000 for payload in found)
    assert len(list(tmp_path.iterdir())) == 1


def test_the_report_of_a_stage_is_about_its_own_programs(tmp_path: Path) -> None:
    result, _ = make(tmp_path)
    by_name: dict[str, StageReport] = {s.stage: s for s in result.report.stages}
    assert by_name["denoise"].attention
    assert by_name["decode"].attention == ()
