"""A trace of steady calls: it names them, and nothing in it was compiled."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from tpuport.core.enums import StageName
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.reports import Reporter, StageReport
from tpuport.core.run.inspection import Inspection
from tpuport.core.run.profile import SteadyTrace
from tpuport.core.seam.ported import port_module, seam_of
from tpuport.core.seam.target import Target
from tpuport.errors import UsageError, WriteError
from tpuport.targets import place_for_port


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


def test_a_compile_would_be_seen(tmp_path: Path) -> None:
    """What the test above looks for is what a trace of a compile has."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(tmp_path, profiler_options=options):
        jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((33, 33))).block_until_ready()
    assert compiles(events(tmp_path))


def run(names: str, folder: Path | None, calls: int) -> tuple[list[str], Any]:
    """Calls of programs "a" and "b", each compiled when it first runs."""
    trace = SteadyTrace("denoise", folder, calls)
    known: dict[str, Any] = {}
    for number, name in enumerate(names):
        trace.turn(name in known)
        if name not in known:
            factor = float(len(known) + number + 2)
            known[name] = jax.jit(lambda x, factor=factor: jnp.sin(x) * factor)
        with trace.call(name, number):
            known[name](jnp.ones((16, 16))).block_until_ready()
    trace.stop()
    return [trace.line()], trace.result()


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
    names: str, calls: int, recorded: dict[str, list[int]], tmp_path: Path
) -> None:
    folder = tmp_path / "deep" / "profile"
    (line,), result = run(names, folder, calls)
    found = events(folder)
    for name in ("denoise_a", "denoise_b"):
        assert steps(found, name) == recorded.get(name, [])
    count = sum(map(len, recorded.values()))
    assert result == {"folder": str(folder / "denoise"), "calls": count}
    assert compiles(found) == set()
    assert any("Execute" in str(event.get("name")) for event in found)
    # What Perfetto reads: events of the Chrome format, with times.
    timed = [event for event in found if event.get("ph") == "X"]
    assert timed
    assert all({"name", "ts", "dur", "pid", "tid"} <= event.keys() for event in timed)
    # What XProf reads: the same calls, each a step.
    (plane,) = folder.rglob("*.xplane.pb")
    profile = jax.profiler.ProfileData.from_file(str(plane))
    named = [
        int(dict(event.stats)["step_num"])
        for plane in profile.planes
        for row in plane.lines
        for event in row.events
        if event.name == "denoise_a"
    ]
    assert sorted(named) == recorded["denoise_a"]
    assert line.startswith(f"denoise: profiled {count} steady call")
    assert f"xprof --logdir {folder}" in line


def test_without_a_steady_call_nothing_is_recorded(tmp_path: Path) -> None:
    (line,), result = run("ab", tmp_path, 5)
    assert (line.endswith("so that none was steady"), result) == (True, None)
    assert run("aaa", None, 5) == ([""], None)
    assert list(tmp_path.iterdir()) == []


def test_another_profile_is_not_disturbed(tmp_path: Path) -> None:
    jax.profiler.start_trace(tmp_path / "theirs")
    try:
        with pytest.raises(UsageError, match="no profile can be recorded: "):
            run("aa", tmp_path / "ours", 1)
    finally:
        jax.profiler.stop_trace()
    assert not (tmp_path / "ours").exists()
    # And a failed run leaves none under way.
    assert run("aa", tmp_path / "ours", 1)[1]["calls"] == 1


def test_a_full_disk_is_named_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with pytest.raises(WriteError, match="denoise: cannot be written: no room"):
            run("aa", folder, 1)
    # What was there stays, and no more is there.
    assert [path for path in old.rglob("*") if path.is_file()] == [earlier]
    assert list(earlier.parents[1].iterdir()) == [earlier.parent]
    assert not new.exists()


# --- the calls of a module


class Turns(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) @ x.T


def inspected(
    tmp_path: Path, **how: Any
) -> tuple[torch.Tensor, StageReport, Inspection]:
    """Four calls of a module in a stage, looked at."""
    placed = place_for_port(MeshSpec(tp=2))
    module = port_module(Turns(), Target(mesh=placed.mesh), Reporter())
    journal = seam_of(module).journal
    asked: dict[str, Any] = {
        "memory": False,
        "profile": None,
        "calls": 2,
        "op_by_op": (),
    }
    devices = placed.mesh.devices.flat
    inspection = Inspection(journal, devices, **{**asked, **how})
    x = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        out = inspection.around(StageName.DENOISE, "Turns", lambda: module(x))
    plain = StageReport(
        stage="denoise", backend="tpuport", unit="step", total_seconds=1
    )
    (report,) = inspection.ended([plain])
    return out, report, inspection


def test_every_call_is_noted_with_its_devices(tmp_path: Path) -> None:
    _, report, inspection = inspected(tmp_path, memory=True)
    assert len(report.memory) == 4
    for call in report.memory:
        assert call["source"] == "planned"
        assert [device["device"] for device in call["devices"]] == ["cpu:0", "cpu:1"]
        assert call["devices"][0]["in_use"] > 0
    first, *_, row, last = inspection.text().splitlines()
    assert first == "memory until then:"
    assert row.split()[:3] == ["denoise", "step", "1-4"]
    assert last.startswith("  planned: ")
    assert inspection.lines([report]) == []  # the summary has the table
    assert report.as_dict()["memory"] == report.memory


def test_what_was_not_asked_for_is_not_told(tmp_path: Path) -> None:
    _, report, inspection = inspected(tmp_path)
    assert (report.memory, report.profile, report.op_by_op) == ((), None, False)
    assert inspection.text() == ""
    assert inspection.lines([report]) == []


def test_steady_calls_of_a_module_are_recorded(tmp_path: Path) -> None:
    _, report, inspection = inspected(tmp_path, profile=tmp_path)
    assert report.profile == {"folder": str(tmp_path / "denoise"), "calls": 2}
    assert steps(events(tmp_path), "denoise_Turns") == [2, 3]
    (line,) = inspection.lines([report])
    assert line.startswith("denoise: profiled 2 steady calls")


def test_op_by_op_gives_the_same_and_compiles_no_program(tmp_path: Path) -> None:
    expected, _, _ = inspected(tmp_path)
    found, report, _ = inspected(
        tmp_path, op_by_op=(StageName.DENOISE,), memory=True, profile=tmp_path
    )
    torch.testing.assert_close(found, expected)
    assert report.op_by_op
    assert {call["source"] for call in report.memory} == {"unknown"}
    assert report.profile is None
