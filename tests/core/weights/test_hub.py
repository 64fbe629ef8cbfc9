"""The hub: what it is asked for, and what people see while files come."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from tpuport.core.files import stores
from tpuport.core.files.stores import StorePath
from tpuport.core.reports import Reporter
from tpuport.core.run.progress import Display
from tpuport.core.weights import hub
from tpuport.core.weights.hub import fetch, file_names
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


STORE = StorePath("memory", "bucket/cache")


class Hub:
    """A hub with one id, and machines that fetch from it with a store between.

    Attributes:
        files: of the newest commit.
        downloads: the names of all files that came from the hub.
        said: lines for people.
    """

    def __init__(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commit, self.files, self.there = "1" * 40, {"a.json": b"12"}, True
        self.files["vae/w.safetensors"] = b"12345"
        self.downloads: list[str] = []
        self.said: list[str] = []
        self._place, self._machine = place, ""
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)
        client(monkeypatch, self._download)
        monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", self._cached)

    def repo_info(self, repo_id: str, *, files_metadata: bool) -> Any:
        if not self.there:
            raise ConnectionError("no route")
        siblings = [
            SimpleNamespace(rfilename=name, size=len(data))
            for name, data in self.files.items()
        ]
        return SimpleNamespace(sha=self.commit, siblings=siblings)

    def _snapshot(self, revision: str) -> Path:
        return self._place / self._machine / "hub" / revision

    def _cached(self, repo_id: str, name: str, revision: str) -> str | None:
        file = self._snapshot(revision) / name
        return str(file) if file.is_file() else None

    def _download(
        self, repo_id: str, *, allow_patterns: list[str], revision: str, **_: Any
    ) -> str:
        folder = self._snapshot(revision)
        for name, data in self.files.items():
            file = folder / name
            if not file.is_file() and name in allow_patterns:
                if not self.there:
                    raise LocalEntryNotFoundError("no snapshot")
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(data)
                self.downloads.append(name)
        return str(folder)

    def fetched(self, machine: str, *names: str) -> dict[str, bytes]:
        """What a machine, with caches of its own, fetches."""
        self._machine = machine
        hub._commits.clear()
        reporter, cache = Reporter(), self._place / machine / "cache"
        reporter.say = self.said.append  # type: ignore[method-assign]
        folder = fetch("me/model", names, reporter, cache=cache, store=STORE)
        return {name: (folder / name).read_bytes() for name in names}


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setitem(stores.SCHEMES, "memory", ("fsspec", "none"))
    yield Hub(tmp_path, monkeypatch)
    fsspec.filesystem("memory").store.clear()
    hub._commits.clear()


def test_a_store_gives_later_machines_what_the_first_one_downloaded(
    shared: Hub,
) -> None:
    files, both = dict(shared.files), tuple(shared.files)
    assert shared.fetched("first", "a.json") == {"a.json": b"12"}
    assert shared.fetched("first", *both) == files
    assert shared.downloads == list(both)
    kept = STORE / "hub/me--model"
    assert sorted(kept.files()) == [*(f"{'1' * 40}/{n}" for n in both), "main.json"]
    assert shared.fetched("second", *both) == files
    assert shared.downloads == list(both)

    # Half an object, as no store has, is not taken for the file.
    (kept / ("1" * 40) / "a.json").write_bytes(b"1")
    assert shared.fetched("third", "a.json") == {"a.json": b"12"}
    assert (kept / ("1" * 40) / "a.json").read_bytes() == b"12"
    # A new commit is another folder, and the old files stay.
    shared.commit, shared.files["a.json"] = "2" * 40, b"34"
    assert shared.fetched("second", "a.json") == {"a.json": b"34"}
    assert (kept / ("1" * 40) / "a.json").read_bytes() == b"12"


def test_a_store_serves_where_the_hub_does_not_answer(shared: Hub) -> None:
    shared.there = False
    with pytest.raises(HubError, match="me/model"):
        shared.fetched("first", "a.json")
    shared.there = True
    shared.fetched("first", "a.json")
    shared.there = False
    assert shared.fetched("second", "a.json") == {"a.json": b"12"}
    (said,) = shared.said
    assert "does not give me/model (ConnectionError): taking commit 11111111" in said
    there = file_names("me/model", "--lora", Reporter(), STORE)
    assert there == ["a.json", "vae/w.safetensors"]
    with pytest.raises(HubError, match="the hub cannot be reached"):
        shared.fetched("second", "vae/w.safetensors")
    # What this machine has already needs neither.
    assert shared.fetched("first", "a.json") == {"a.json": b"12"}


def test_a_store_notes_a_commit_once_it_has_the_files(shared: Hub) -> None:
    both = tuple(shared.files)
    shared.fetched("first", *both)
    shared.commit = "2" * 40
    for machine, names, noted in (("a", both[:1], "1"), ("b", both, "2")):
        shared.there = True
        shared.fetched(machine, *names)
        shared.there = False
        assert shared.fetched(f"later than {machine}", *both) == shared.files
        assert f"taking commit {noted * 8}" in shared.said[-1]


def test_a_hub_that_refuses_is_not_gone_around(
    shared: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    class GatedError(ConnectionError):
        response = SimpleNamespace(status_code=403)

    def refuse(repo_id: str, **how: Any) -> None:
        raise GatedError("ask for access")

    shared.fetched("first", "a.json")
    monkeypatch.setattr(shared, "repo_info", refuse)
    with pytest.raises(HubError, match=r"could not be fetched \(GatedError"):
        shared.fetched("second", "a.json")
