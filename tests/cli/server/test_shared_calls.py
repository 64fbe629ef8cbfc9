"""Several jobs in one call; the engines make nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from tests.cli.server.conftest import Server
from tests.cli.server.running import until
from tpuport.cli.batches.packs import run_dir
from tpuport.cli.server.dispatcher import TRIES
from tpuport.cli.server.jobs import COMPLETED, RUNNING
from tpuport.cli.server.messages import (
    Gone,
    Stop,
    Told,
)
from tpuport.cli.server.work import Work


def packing(serve: Callable[..., Server], **took: float) -> Server:
    """A server that has measured two videos in one call, and makes a job."""
    server = serve(batch_size=2)
    server.warm()
    server.measured(**took)
    server.add("first")
    server.made.wake()
    server.runs("first")
    return server


def test_jobs_of_one_owner_share_a_call_where_that_pays(
    serve: Callable[..., Server],
) -> None:
    server = packing(serve, alone=1.0, together=1.5)
    assert server.made.shapes[0].as_dict()["batches"] == [
        {"videos": 2, "step_seconds": 1.5, "step_seconds_alone": 1.0, "used": True}
    ]
    server.add("fox", "one")
    server.add("cat", "two")
    server.add("cow", "one", num_inference_steps=3)
    server.add("hen", "one")
    server.add("dog", "one")
    server.engine().end()
    make = server.runs("fox", "hen")
    (pack,) = make.packs
    prompts = [one.settings.prompt for one in pack]
    assert prompts == [("a fox",), ("a hen",)]
    places = [Path(str(one.settings.out)).parent.name for one in pack]
    assert places == ["fox", "hen"]
    server.engine().hear(Told(job="fox", what="denoise", call=0, done=3, total=9))
    until(lambda: cast("Work", server.made.work_of("hen")).done_of(1) == 3)
    server.engine().end()
    server.runs("cat")
    assert [server.status(name) for name in ("fox", "hen")] == [COMPLETED] * 2
    server.engine().end()
    server.runs("cow")
    server.engine().end()
    server.runs("dog")
    # The videos of a job too, as many as there are programs for; of no image.
    server.add("bee", seeds=(1, 2, 3))
    server.add("ant", seeds=(1, 2), image="x.png")
    server.engine().end()
    assert [len(pack) for pack in server.runs("bee").packs] == [2, 1]
    server.engine().end()
    assert [len(pack) for pack in server.runs("ant").packs] == [1, 1]


def test_nothing_is_shared_where_that_does_not_pay(
    serve: Callable[..., Server],
) -> None:
    server = packing(serve, alone=1.0, together=2.0)
    server.add("fox")
    server.add("hen", seeds=(1, 2))
    server.engine().end()
    server.runs("fox")
    server.engine().end()
    assert [len(pack) for pack in server.runs("hen").packs] == [1, 1]
    # What was begun together goes on, as after a kill of the server.
    server.add("cat")
    server.add("dog")
    requests = [
        one
        for name in ("cat", "dog")
        for one in server.made.files.requests(
            name, {"prompt": f"a {name}", "size": "32x16", "num_frames": 5}, (0,)
        )
    ]
    run_dir(tuple(requests)).mkdir(parents=True)
    server.engine().end()
    server.runs("cat", "dog")


def test_calls_are_measured_anew_by_an_engine_in_place_of_another(
    serve: Callable[..., Server],
) -> None:
    """A video that is there is not made, and its seconds are not told."""
    server = serve(batch_size=2)
    server.warm()
    until(lambda: len(server.engine().make.packs) == 4)
    (video,) = server.engine().make.packs[0][0].paths
    Path(str(video)).write_bytes(b"made")
    server.lose()
    until(lambda: server.engine().asked)
    assert not video.exists()
    server.measured(alone=1.0, together=1.5)
    assert server.made.shapes[0].batches[0].pays


@pytest.mark.parametrize("kept", ["run-0", "video-0.mp4"])
def test_a_job_that_was_begun_alone_goes_on_alone(
    serve: Callable[..., Server], kept: str
) -> None:
    server = packing(serve, alone=1.0, together=1.5)
    (server.made.files.place("first") / kept).mkdir()
    server.add("fox")
    server.add("hen")
    server.add("cat", seeds=(1, 2))
    server.lose()
    assert [len(pack) for pack in server.runs("first").packs] == [1]
    # And so does one behind another, here after a kill of the server; or one of two.
    server.made.files.place("hen").mkdir()
    (server.made.files.place("hen") / kept).mkdir()
    server.made.files.place("cat").mkdir()
    (server.made.files.place("cat") / kept).mkdir()
    for name in ("first", "fox", "hen"):
        server.runs(name)
        server.engine().end()
    assert [len(pack) for pack in server.runs("cat").packs] == [1, 1]


def test_the_calls_of_a_job_that_were_begun_take_no_other_job(
    serve: Callable[..., Server],
) -> None:
    server = serve(batch_size=4)
    server.warm()
    for size in (2, 4):
        until(lambda size=size: len(server.engine().make.packs[-1]) == size)
        server.engine().end(denoise=(9.0, 9.0, 3.0, 3.5))
    until(lambda: len(server.made.shapes[0].batches) == 2)
    server.add("fox", seeds=(1, 2))
    server.made.wake()
    (pack,) = server.runs("fox").packs
    run_dir(pack).mkdir()
    server.add("hen", seeds=(1, 2))
    server.lose()
    assert server.runs("fox").packs == (pack,)
    server.engine().end()


def test_only_jobs_that_may_share_a_call_are_looked_at(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    server = packing(serve, alone=1.0, together=1.5)
    server.add("fox")
    server.add("ant", image="x.png")  # which would be read
    server.add("hen")
    server.add("dog")
    seen: list[str] = []
    real = server.made.files.requests

    def requests(name: str, *given: Any) -> Any:
        seen.append(name)
        return real(name, *given)

    monkeypatch.setattr(server.made.files, "requests", requests)
    server.engine().end()
    server.runs("fox", "hen")
    assert seen == ["fox", "hen"]


def test_a_call_is_counted_once(serve: Callable[..., Server]) -> None:
    server = packing(serve, alone=1.0, together=1.5)
    for name in ("fox", "hen", "cat", "dog"):
        server.add(name)
    server.engine().end()
    server.runs("fox", "hen")
    server.engine().end(result={"frames": 8, "stages": {"denoise": 4.0}})
    server.runs("cat", "dog")
    server.delete("dog")
    # Its last step was made:
    server.engine().end(result={"frames": 8, "stages": {"denoise": 4.0}})
    until(lambda: server.status("cat") == COMPLETED)
    until(lambda: not server.made.files.place("dog").exists())
    told = server.made.metrics.text(0, 0, 0).decode()
    assert 'tpuport_stage_seconds_sum{stage="denoise"} 8.0' in told
    assert 'tpuport_jobs_total{status="completed"} 4.0' in told


def test_engines_that_a_shared_call_has_cost_are_charged_to_nobody(
    serve: Callable[..., Server],
) -> None:
    server = packing(serve, alone=1.0, together=1.5)
    server.add("fox")
    server.add("hen")
    server.engine().end()
    for _ in range(TRIES - 1):
        server.runs("fox", "hen")
        server.lose()
    for name in ("fox", "hen"):
        for _ in range(TRIES - 1):
            server.runs(name)
            server.lose()
        server.runs(name)
        server.engine().end()
        until(lambda name=name: server.status(name) == COMPLETED)
    assert not server.made._alone


def test_nothing_stays_of_a_job_deleted_after_a_call_that_failed(
    serve: Callable[..., Server],
) -> None:
    server = packing(serve, alone=1.0, together=1.5)
    server.add("fox")
    server.add("hen")
    server.engine().end()
    server.runs("fox", "hen")
    server.engine().end(error="no memory")
    server.runs("fox")
    server.delete("fox")
    server.engine().end(stopped=True)
    server.runs("hen")
    assert server.made._alone == {"hen"}


def test_a_delete_of_a_partner_stops_the_call(serve: Callable[..., Server]) -> None:
    server = packing(serve, alone=1.0, together=1.5)
    server.add("fox")
    server.add("hen")
    server.engine().end()
    (pack,) = server.runs("fox", "hen").packs
    run_dir(pack).mkdir()
    server.delete("hen")
    until(lambda: Stop("fox") in server.engine().sent)
    assert server.status("fox") == RUNNING
    server.engine().end(stopped=True)
    (alone,) = server.runs("fox").packs
    assert [one.settings.prompt for one in alone] == [("a fox",)]
    found = server.jobs.get("fox")
    assert found is not None
    assert found.tries == 0
    assert not server.made.files.place("hen").exists()
    assert not run_dir(pack).exists()


@pytest.mark.parametrize("lost", [False, True])
def test_a_call_that_fails_is_made_one_by_one(
    serve: Callable[..., Server], lost: bool
) -> None:
    """At once after an error; engines may be lost with it before, but for one."""
    server = packing(serve, alone=1.0, together=1.5)
    server.add("fox")
    server.add("hen")
    server.engine().end()
    (pack,) = server.runs("fox", "hen").packs
    run_dir(pack).mkdir()
    for _ in range(TRIES - 1 if lost else 0):
        until(lambda: server.runs("fox", "hen"))
        (old := server.engine()).hear(Gone())
        until(lambda old=old: server.engine() is not old)
    if not lost:
        server.engine().end(error="no memory", passes=True)
    server.runs("fox")
    assert not run_dir(pack).exists()
    server.engine().end(error="a NaN")
    server.runs("hen")
    server.engine().end()
    until(lambda: server.status("hen") == COMPLETED)
    assert server.status("fox") == "failed"
