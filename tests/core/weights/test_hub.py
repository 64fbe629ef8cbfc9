"""The hub: what it is asked for, and what people see while files come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tpuport.core.run.progress import Display
from tpuport.core.weights.hub import fetch
from tpuport.errors import HubError

GIB = 2**30


def client(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)


def test_files_and_bytes_are_told_as_they_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    display, shown = Display(), []

    def download(repo_id: str, *, allow_patterns: list[str], tqdm_class: Any) -> str:
        """As the client counts: received, written, and whole files."""
        assert (repo_id, allow_patterns) == ("me/model", ["*.json"])
        size = {"unit": "B", "unit_scale": True, "total": 0, "initial": 0}
        received = tqdm_class(desc="Downloading bytes", bar_format="x", **size)
        written = tqdm_class(desc="Reconstructing", bar_format="x", **size)
        with tqdm_class(desc="Fetching 2 files", total=2) as files:
            for _ in range(2):
                written.total += 3 * GIB
                for _ in range(3):
                    received.update(GIB)
                    written.update(GIB)
                    shown.append(display._status())
                files.update(1)
        received.close()
        written.set_description("done")
        return "/somewhere"

    client(monkeypatch, download)
    assert fetch("me/model", ["*.json"], display) == Path("/somewhere")
    assert {what for what, _ in shown} == {"downloading me/model"}
    assert [far for _, far in shown][::2] == [
        "0 of 2 files, 1.00 GiB of 3.00 GiB",
        "0 of 2 files, 3.00 GiB of 3.00 GiB",
        "1 of 2 files, 5.00 GiB of 6.00 GiB",
    ]


@pytest.mark.parametrize("offline", [True, False])
def test_what_is_not_there_offline_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    def unreachable(*args: Any, **kwargs: Any) -> str:
        raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot")

    client(monkeypatch, unreachable)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", offline)
    with pytest.raises(HubError) as caught:
        fetch("me/model", [], Display())
    assert ("HF_HUB_OFFLINE is set" in str(caught.value)) is offline
    assert ("check the network" in str(caught.value)) is not offline
    assert "pass the folder to --weights" in str(caught.value)


def test_whatever_else_the_client_raises_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*args: Any, **kwargs: Any) -> str:
        raise ValueError("no such id.\n\nSee the long\nmanual " + "x" * 500)

    client(monkeypatch, unknown)
    with pytest.raises(HubError, match="could not be fetched") as caught:
        fetch("me/model", [], Display())
    assert "(ValueError: no such id)" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300
