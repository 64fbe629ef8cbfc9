"""Calls are dispatched a few ahead, never unboundedly, and the report says how many."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tpuport
from tests.core.spec.toys import installed_toy
from tpuport.core.programs.lowering import Traced
from tpuport.core.programs.program_store import Programs, Ready
from tpuport.core.reports import CompileReport, Reporter, StageReport
from tpuport.core.run import executor as executors
from tpuport.core.run.executor import CALLS_IN_FLIGHT, Executor
from tpuport.core.run.profile import SteadyTrace
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, Work

CALLS = 23


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    cache = tmp_path_factory.mktemp("cache")
    with installed_toy(), tpuport.load("toy", cache_dir=cache) as session:
        yield session


class Device:
    """Dispatches at once and finishes what is waited for, and all before it."""

    def __init__(self) -> None:
        self.dispatched = 0
        self.finished = 0
        #: Calls that were not finished when each was dispatched, itself included.
        self.depths: list[int] = []

    def call(self, *args: Any) -> tuple[Any, Any]:
        self.dispatched += 1
        self.depths.append(self.dispatched - self.finished)
        return Promise(self), Promise(self)

    def call_without_output(self, *args: Any) -> tuple[Any, Any]:
        return self.call(*args)[0], None


class Promise:
    """An array that is being computed."""

    shape, dtype = (), "float32"

    def __init__(self, device: Device) -> None:
        self.device, self.number = device, device.dispatched

    def block_until_ready(self) -> Promise:
        self.device.finished = max(self.device.finished, self.number)
        return self


class Instant(Programs):
    """Programs that are ready, the first time with a report of a compile."""

    def __init__(self, components: Any, call: Any) -> None:
        super().__init__(components)
        self._made = Ready(call=call, traced=Traced())
        self._told = False

    def __contains__(self, signature: Any) -> bool:
        return self._told

    def get(self, asked: Any, request: Any) -> Any:
        report = None if self._told else _report(asked.stage, asked.name)
        self._told = True
        return self._made, report


def _report(stage: str, program: str) -> CompileReport:
    return CompileReport(
        stage=stage, program=program, trace_seconds=0, compile_seconds=0, cached=False
    )


def run(
    session: Any, call: Any, inspection: RunSettings | None = None
) -> tuple[StageReport, list[int]]:
    """A stage of many calls; the report, and which outputs were watched, in order."""
    watched: list[int] = []
    work = Work(
        carry=None,
        constants=None,
        calls=(Call("step", {"t": np.float32(i)}) for i in range(CALLS)),
        total=CALLS,
        finish=lambda carry, outputs: {"latents": np.zeros(1)},
        watch=lambda index, output: watched.append(index),
    )
    stage = Stage(
        name="denoise",
        unit="step",
        components=("transformer",),
        programs={
            "step": Program(
                component="transformer", fn=lambda *args: pytest.fail("not called")
            )
        },
        plan=lambda context: work,
        upstream=lambda context: pytest.fail("not called"),
        writes=(),
    )
    executor = Executor(
        session.components,
        inspection or RunSettings(),
        programs=Instant(session.components, call),
    )
    _, report = executor.run(stage, session.request(prompt="a cat"), {})
    return report, watched


@pytest.mark.parametrize("limit", [1, 2, 4])
def test_calls_are_dispatched_up_to_the_limit(
    limit: int, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(executors.CALLS_IN_FLIGHT, "cpu", limit)
    device = Device()
    report, watched = run(session, device.call)
    assert device.dispatched == device.finished == CALLS
    assert max(device.depths) == limit
    # After the first call, which is timed alone, the pipeline fills and stays full.
    assert device.depths[:2] == [1, 1]
    assert set(device.depths[limit + 1 :]) == {limit}
    assert watched == list(range(CALLS))
    assert (report.calls_in_flight, report.calls_in_flight_limit) == (limit, limit)
    assert report.as_dict()["calls_in_flight"] == limit


@pytest.mark.parametrize("limit", [1, 4])
def test_calls_without_an_output_are_bounded_too(
    limit: int, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(executors.CALLS_IN_FLIGHT, "cpu", limit)
    device = Device()
    report, watched = run(session, device.call_without_output)
    assert device.dispatched == device.finished == CALLS
    assert max(device.depths) == limit
    assert watched == list(range(CALLS))
    assert report.calls_in_flight == limit


def test_what_runs_has_ended_before_a_recording_begins(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(executors.CALLS_IN_FLIGHT, "cpu", 4)
    device = Device()
    under_way: list[int] = []

    def turn(self: SteadyTrace, steady: bool, pause: Any) -> None:
        # Once the pipeline is full.
        if device.dispatched in (9, 15):
            pause()
            under_way.append(device.dispatched - device.finished)

    monkeypatch.setattr(SteadyTrace, "turn", turn)
    report, watched = run(session, device.call, RunSettings(profile=tmp_path))
    assert under_way == [0, 0]
    assert report.calls_in_flight == 4
    assert watched == list(range(CALLS))


def test_chips_are_kept_busy_and_cpus_run_one_program_at_a_time() -> None:
    assert CALLS_IN_FLIGHT["tpu"] > 1
    # Programs with collectives must not overlap on virtual devices.
    assert CALLS_IN_FLIGHT["cpu"] == 1


def test_a_call_is_told_when_it_has_ended(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(executors.CALLS_IN_FLIGHT, "cpu", 3)
    device = Device()
    told: list[tuple[int, int]] = []

    def advanced(self: Reporter, stage: str, done: int, total: int) -> None:
        told.append((done, device.dispatched))

    monkeypatch.setattr(Reporter, "advanced", advanced)
    report, _ = run(session, device.call)
    assert [done for done, _ in told] == [n + 1 for n in range(CALLS)]
    assert all(done <= device.finished for done, _ in told)
    # The first is waited for; of the others three are on the way.
    assert told[:2] == [(1, 1), (2, 4)]
    assert report.calls_in_flight == 3
