"""What is refused before any work."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi.testclient import TestClient

from tpuport.cli.server.api import FREE, Service, application
from tpuport.cli.server.fields import Limits
from tpuport.cli.server.guard import Guard
from tpuport.cli.server.jobs import Jobs
from tpuport.cli.server.metrics import Metrics
from tpuport.cli.server.work import READY


def test_a_full_disk_takes_no_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = Jobs(tmp_path / "jobs.sqlite3")
    files = SimpleNamespace(folder=tmp_path)
    made: Any = SimpleNamespace(status=READY, error="", jobs=jobs, files=files)
    service = Service(
        dispatcher=made,
        metrics=Metrics(),
        model="fox",
        limits=Limits(steps=9, loras={}),
        queue=3,
        urls=False,
        created=0,
    )
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
