"""A trace of steady calls: it names them, and nothing in it was compiled."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tpuport
from tests.core.heard import Heard, installed_toy
from tpuport.core.run.executor import Executor
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, Work
from tpuport.errors import UsageError, WriteError


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with installed_toy():
        yield tmp_path_factory.mktemp("cache")


def events(folder: Path) -> list[dict[str, Any]]:
    """What is in the traces of a folder."""
    files = sorted(folder.rglob("*.trace.json.gz"))
    assert files
    return [
        event
        for file in files
        if file.name != "perfetto_trace.json.gz"
        for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    ]


def compiles(found: list[dict[str, Any]]) -> set[str]:
    words = ("compile", "lower", "trace_to_jaxpr")
    names = {str(event.get("name", "")) for event in found}
    return {name for name in names if any(word in name.lower() for word in words)}


def steps(found: list[dict[str, Any]], name: str) -> list[int]:
    """The numbers of the calls of that name."""
    return sorted(
        int(event["args"]["step_num"])
        for event in found
        if event.get("name") == name and "step_num" in event.get("args", {})
    )


def test_steady_steps_are_in_the_trace_and_no_compile(
    cache: Path, tmp_path: Path
) -> None:
    heard = Heard()
    folder = tmp_path / "deep" / "profile"
    with tpuport.load(
        "toy", cache_dir=cache, compile_cache=False, profile=folder, reporter=heard
    ) as session:
        report = session.generate("a cat", num_inference_steps=7).report
    found = events(folder / "denoise")
    # The first call is the one that was compiled; of the others there are three.
    assert steps(found, "denoise_step") == [1, 2, 3]
    assert any("Execute" in str(e.get("name")) for e in found)
    assert compiles(found) == set()
    assert sorted(path.name for path in folder.iterdir()) == ["denoise"]
    # What XProf reads: the same calls, each a step.
    (plane,) = folder.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(plane))
    named = [
        dict(event.stats).get("step_num")
        for plane in profile.planes
        for line in plane.lines
        for event in line.events
        if event.name == "denoise_step"
    ]
    assert sorted(map(int, named)) == [1, 2, 3]
    # What Perfetto reads: events of the Chrome format, with times.
    timed = [event for event in found if event.get("ph") == "X"]
    assert timed
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in timed)
    stages = {stage.stage: stage for stage in report.stages}
    assert stages["denoise"].profile == {"folder": str(folder / "denoise"), "calls": 3}
    assert stages["encode"].profile is None
    assert stages["denoise"].steady_calls == 6
    (where,) = heard.about("xprof --logdir")
    assert where.startswith(f"denoise: profiled 3 steady calls in {folder}")
    assert len(heard.about("none was steady")) == 2


def test_a_compile_would_be_seen(tmp_path: Path) -> None:
    """What the test above looks for is what a trace of a compile has."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(tmp_path, profiler_options=options):
        jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((33, 33))).block_until_ready()
    assert compiles(events(tmp_path))


def run(session: Any, names: str, inspection: RunSettings) -> Any:
    """A stage whose calls are of programs "a" and "b"."""
    stage = Stage(
        name="denoise",
        unit="step",
        components=("transformer",),
        programs={
            name: Program(
                component="transformer",
                fn=lambda model, carry, constants, inputs: (carry + inputs["x"], None),
            )
            for name in "ab"
        },
        plan=lambda context: Work(
            carry=np.float32(0),
            constants=None,
            calls=[Call(name, {"x": np.float32(1)}) for name in names],
            total=len(names),
            finish=lambda carry, outputs: {"latents": np.asarray(carry)[None]},
        ),
        upstream=lambda context: {},
        writes=(),
    )
    executor = Executor(session.components, inspection)
    made, report = executor.run(stage, session.request(prompt="a cat"), {})
    assert made["latents"].tolist() == [len(names)]
    return report


@pytest.mark.parametrize(
    ("names", "calls", "recorded"),
    [
        # The recording ends before b is compiled.
        ("aaabbbb", 5, {"denoise_a": [1, 2]}),
        ("abab", 5, {"denoise_a": [2], "denoise_b": [3]}),
        ("aaaaaa", 2, {"denoise_a": [1, 2]}),
        ("aa", 1, {"denoise_a": [1]}),
    ],
)
def test_what_is_recorded_is_steady(
    names: str, calls: int, recorded: dict[str, list[int]], cache: Path, tmp_path: Path
) -> None:
    with tpuport.load("toy", cache_dir=cache) as session:
        report = run(session, names, RunSettings(profile=tmp_path, profile_calls=calls))
    found = events(tmp_path)
    for name in ("denoise_a", "denoise_b"):
        assert steps(found, name) == recorded.get(name, [])
    assert report.profile["calls"] == sum(map(len, recorded.values()))
    assert compiles(found) == set()
    assert report.steady_calls == len(names) - len(set(names))


def test_another_profile_is_not_disturbed(cache: Path, tmp_path: Path) -> None:
    with tpuport.load("toy", cache_dir=cache, profile=tmp_path / "ours") as session:
        jax.profiler.start_trace(tmp_path / "theirs")
        try:
            with pytest.raises(UsageError, match="no profile can be recorded: "):
                session.generate("a cat")
        finally:
            jax.profiler.stop_trace()
        assert not (tmp_path / "ours").exists()
        # And a failed run leaves none under way.
        assert session.generate("a cat").report.stages[1].profile["calls"] == 2


def test_a_folder_of_others_is_refused_and_a_full_disk_named(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for folder, what in (("file", "file is not a folder"), (".", "holds file, which")):
        with pytest.raises(UsageError, match=what):
            tpuport.load("toy", cache_dir=cache, profile=tmp_path / folder)

    written = "denoise/plugins/profile/{}/vm.xplane.pb"
    old, new = tmp_path / "old", tmp_path / "new"
    earlier = old / written.format("earlier")
    earlier.parent.mkdir(parents=True)
    earlier.write_bytes(b"whole")

    def full(*args: Any, **kwargs: Any) -> None:
        cut = folder / written.format("now")
        cut.parent.mkdir(parents=True)
        cut.write_bytes(b"cut")
        raise RuntimeError("RESOURCE_EXHAUSTED: vm.xplane.pb; No space left on device")

    monkeypatch.setattr(jax.profiler, "start_trace", lambda *args, **kwargs: None)
    monkeypatch.setattr(jax.profiler, "stop_trace", full)
    for folder in (old, new):
        with (
            tpuport.load("toy", cache_dir=cache, profile=folder) as session,
            pytest.raises(
                WriteError, match="denoise: cannot be written: no room"
            ) as caught,
        ):
            session.generate("a cat")
        assert caught.value.exit_code == 1
    # What was there stays, and no more is there.
    assert [path for path in old.rglob("*") if path.is_file()] == [earlier]
    assert list(earlier.parents[1].iterdir()) == [earlier.parent]
    assert not new.exists()
    with pytest.raises(UsageError, match="profile_calls: 0 is not positive"):
        tpuport.load("toy", cache_dir=cache, profile=tmp_path, profile_calls=0)
