"""What is refused before any work."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient

from tpuport.cli.asked.settings import Settings
from tpuport.cli.server.api import FREE, Service, application
from tpuport.cli.server.fields import Limits, Shape
from tpuport.cli.server.guard import Guard
from tpuport.cli.server.jobs import FAILED, Job, Jobs
from tpuport.cli.server.messages import Checked, Refused
from tpuport.cli.server.metrics import Metrics
from tpuport.cli.server.work import READY

NAME = "video_1"


def service_of(**dispatcher: Any) -> Service:
    made: Any = SimpleNamespace(status=READY, error="", **dispatcher)
    return Service(
        dispatcher=made,
        metrics=Metrics(),
        model="fox",
        limits=Limits(steps=9, loras={}),
        queue=3,
        urls=False,
        created=0,
    )


def test_steps_that_a_request_leaves_to_the_model_are_within_the_most(
    tmp_path: Path,
) -> None:
    request = SimpleNamespace(settings=Settings(), digest="")
    found = Checked(number=1, facts={"steps": 10})
    service = service_of(
        shapes=(Shape(32, 16, 5, 8.0, "ready"),),
        below=Settings(),
        image=False,
        files=SimpleNamespace(
            requests=lambda *given: [request], place=lambda name: tmp_path / name
        ),
        checks=SimpleNamespace(check=lambda settings: found),
    )
    with pytest.raises(Refused, match="num_inference_steps: is more than 9"):
        service.add({"prompt": "a fox"}, None, "", None)


def test_a_full_disk_takes_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(tmp_path / "jobs.sqlite3")
    assert jobs.add(Job(id=NAME, owner="", asked={}), 9)
    service = service_of(jobs=jobs, files=SimpleNamespace(folder=tmp_path))
    guard = Guard(application(service), keys=(), local=False, metrics=Metrics())
    client = TestClient(guard)
    answer = client.head("/health")
    assert (answer.status_code, answer.content) == (200, b"")
    free = FREE - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    answer = client.post("/v1/videos", json={"prompt": "a fox"})
    error = cast("dict[str, Any]", answer.json())["error"]
    assert (answer.status_code, error["message"]) == (
        *(507, "the disk of the server is full"),
    )
    free = FREE
    assert client.post("/v1/videos", content=b"{").status_code == 400
    jobs._base.execute("PRAGMA query_only = ON")  # as where a journal has no room
    answer = client.delete(f"/v1/videos/{NAME}")
    assert (answer.status_code, "cannot be written" in answer.text) == (507, True)
    service.dispatcher.status = FAILED
    assert client.get("/health").status_code == 503
