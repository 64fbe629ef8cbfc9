"""What names weights: a folder, or what is fetched from the hub or from a store.

A store may keep what came from the hub: ``hub/OWNER--NAME/COMMIT/`` has the files, each
there whole or not at all, and ``hub/OWNER--NAME/main.json`` the newest commit that the
store has, with the bytes of all its files.
"""

from __future__ import annotations

import contextlib
import fnmatch
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tpuport.core.files.atomic import one_line
from tpuport.core.files.fingerprint import FINGERPRINT_WHOLE_BYTES
from tpuport.core.files.stores import StorePath, fetched, place
from tpuport.core.files.typed import checked, read_json
from tpuport.core.mesh.hosts import here
from tpuport.core.reports import Reporter
from tpuport.errors import (
    HubError,
    MissingWeightsError,
    TpuportError,
    WeightsError,
    damaged,
)

#: Of a store: what came from the hub.
HUB = "hub"
#: Answers of a hub that does not give what it has, or has it no more.
_REFUSED = (401, 403, 404)


@dataclass(frozen=True)
class _Commit:
    """What the hub has under an id.

    Attributes:
        name: of the commit.
        sizes: bytes of each file.
    """

    name: str
    sizes: Mapping[str, int]


#: What was asked in this process, so that all files of a run are of one commit.
_commits: dict[tuple[str, StorePath], _Commit | None] = {}

#: The files that name a pipeline and its components; the second, of one made of blocks.
INDEXES = ("model_index.json", "modular_model_index.json")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def local_folder(weights: str | Path) -> Path | None:
    """The folder that ``weights`` names; ``None`` for a hub id or a store's address.

    Raises:
        MissingWeightsError: there is no such folder, and it cannot be a hub id.
    """
    text = str(weights)
    folder = place(text)
    if isinstance(folder, StorePath):
        return None
    if folder.is_dir():
        return folder
    if folder.exists():
        raise MissingWeightsError(
            f"weights {text!r} is a file; a folder in the diffusers layout is needed"
        )
    if isinstance(weights, str) and _HUB_ID.fullmatch(text):
        return None
    raise MissingWeightsError(
        f"weights folder {text!r} does not exist, and it is not a hub id "
        "(owner/name) either"
    )


def read_index(folder: Path) -> tuple[str, dict[str, Any]]:
    """The name and the content of the file that names a pipeline.

    Raises:
        WeightsError: there is none, or it is no JSON object.
    """
    there = [name for name in INDEXES if (folder / name).is_file()]
    name = there[0] if there else INDEXES[0]
    return name, read_object(folder / name)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint.

    Raises:
        WeightsError: there is none.
    """
    try:
        data = read_json(path, WeightsError, "download the file again")
    except FileNotFoundError:
        raise WeightsError(
            f"{path} is missing; the folder is not a diffusers checkpoint (one has "
            f"{' or '.join(INDEXES)}, and a folder per component)"
        ) from None
    if not isinstance(data, dict):
        raise damaged(f"{path} is not a JSON object")
    return data


def fetch(
    repo_id: str,
    patterns: Sequence[str],
    reporter: Reporter,
    flag: str = "--weights",
    cache: Path | None = None,
    store: StorePath | None = None,
) -> Path:
    """The files of a hub id whose names match ``patterns``, as a folder.

    Of large safetensors files in a store each of several processes gets the header
    alone, if its machine has no copy. The weights are then read in slices.

    Args:
        repo_id: or the address of a folder in a store.
        reporter: told of the files and the bytes that have come.
        flag: that takes a folder of this machine in place of the hub id.
        cache: the cache folder, for what comes from a store.
        store: keeps what comes from the hub, and is asked first.

    Raises:
        HubError: the hub cannot be reached or has no such checkpoint.
        StoreError: the store cannot be read, or has no such folder.
    """
    folder = place(repo_id)
    if isinstance(folder, StorePath):
        assert cache is not None
        return _fetched(folder, patterns, cache, reporter)
    with _explained(repo_id, flag):
        if store is None or cache is None:
            return _downloaded(repo_id, patterns, reporter)
        return _by_store(repo_id, patterns, reporter, cache, store)


def _fetched(
    folder: StorePath, patterns: Sequence[str], cache: Path, reporter: Reporter
) -> Path:
    largest = FINGERPRINT_WHOLE_BYTES if here().several else None
    return fetched(folder, patterns, cache, reporter, largest)


def _by_store(
    repo_id: str,
    patterns: Sequence[str],
    reporter: Reporter,
    cache: Path,
    store: StorePath,
) -> Path:
    """:func:`fetch` from the hub's own cache, the store, or the hub, in this order."""
    commit = _commit(repo_id, store, reporter)
    if commit is None:
        return _downloaded(repo_id, patterns, reporter)
    folder = _folder(repo_id, store) / commit.name
    there = {name: size for name, (size, _) in folder.files().items()}
    wanted = [n for n in commit.sizes if any(fnmatch.fnmatch(n, p) for p in patterns)]
    missing = [name for name in wanted if there.get(name) != commit.sizes[name]]
    if not missing and not _at_hand(repo_id, commit, wanted):
        return _fetched(folder, patterns, cache, reporter)
    local = _downloaded(repo_id, patterns, reporter, revision=commit.name)
    if missing and here().first:
        with reporter.timed(f"putting {repo_id} into {store}"):
            for name in missing:
                (folder / name).put(local / name)
        _note(repo_id, store, commit, {*there, *missing})
    return local


def _note(repo_id: str, store: StorePath, commit: _Commit, there: Set[str]) -> None:
    """Note a commit, once the store has as much of the commit as of the one before.

    Args:
        there: the files that the store has.
    """
    before = _noted(repo_id, store)
    if before is not None:
        if before.name == commit.name:
            return
        old = (_folder(repo_id, store) / before.name).files()
        if not {*old} & {*commit.sizes} <= there:
            return
    _notes(repo_id, store).write_bytes(json.dumps(asdict(commit)).encode())


def _noted(repo_id: str, store: StorePath) -> _Commit | None:
    """The commit that was noted last."""
    notes = _notes(repo_id, store)
    try:
        read = json.loads(notes.read_bytes())
    except FileNotFoundError:
        return None
    return checked(_Commit, read, notes, "remove the file")


def _notes(repo_id: str, store: StorePath) -> StorePath:
    return _folder(repo_id, store) / "main.json"


def _folder(repo_id: str, store: StorePath) -> StorePath:
    return store / HUB / repo_id.replace("/", "--")


def _commit(repo_id: str, store: StorePath, reporter: Reporter) -> _Commit | None:
    """What the hub has now; where the hub does not answer, what it had for the machine
    that asked last, or ``None`` if none did."""
    asked = repo_id, store
    if asked not in _commits:
        found: _Commit | None
        try:
            found = _asked(repo_id)
        except Exception as error:
            answer = getattr(error, "response", None)
            if answer is not None and answer.status_code in _REFUSED:
                raise
            found = _noted(repo_id, store)
            if found is not None:
                reporter.say(
                    f"the hub does not give {repo_id} ({type(error).__name__}): taking "
                    f"commit {found.name[:8]}, which {store} has"
                )
        _commits[asked] = found
    return _commits[asked]


def _asked(repo_id: str) -> _Commit:
    from huggingface_hub import HfApi

    found: Any = HfApi().repo_info(repo_id, files_metadata=True)
    return _Commit(found.sha, {one.rfilename: one.size for one in found.siblings})


def _at_hand(repo_id: str, commit: _Commit, names: Sequence[str]) -> bool:
    """Whether the hub's own cache has all these files."""
    from huggingface_hub import try_to_load_from_cache

    found = (try_to_load_from_cache(repo_id, n, revision=commit.name) for n in names)
    return all(isinstance(one, str) for one in found)


def _downloaded(
    repo_id: str, patterns: Sequence[str], reporter: Reporter, **how: Any
) -> Path:
    from huggingface_hub import snapshot_download

    with reporter.timed(f"downloading {repo_id}"):
        found = snapshot_download(
            repo_id,
            allow_patterns=list(patterns),
            tqdm_class=_bars(repo_id, reporter),
            **how,
        )
    return Path(found)


def file_names(
    repo_id: str, flag: str, reporter: Reporter, store: StorePath | None = None
) -> list[str]:
    """The files of a hub id; without the hub those that are in its cache.

    Args:
        flag, reporter, store: as of :func:`fetch`.

    Raises:
        HubError: as of :func:`fetch`.
    """
    from huggingface_hub import constants, list_repo_files, snapshot_download

    with _explained(repo_id, flag):
        if store is not None and (commit := _commit(repo_id, store, reporter)):
            return list(commit.sizes)
        if not constants.HF_HUB_OFFLINE:
            return list(list_repo_files(repo_id))
        folder = Path(snapshot_download(repo_id))
        files = (path for path in folder.rglob("*") if path.is_file())
        return sorted(path.relative_to(folder).as_posix() for path in files)


@contextlib.contextmanager
def _explained(repo_id: str, flag: str) -> Iterator[None]:
    """What the hub's client raises, as one line."""
    from huggingface_hub import constants
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        yield
    except TpuportError:  # of a store
        raise
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set: unset it"
        if not constants.HF_HUB_OFFLINE:
            why = "check the network"
        raise HubError(
            f"hub id {repo_id!r} is not in the cache and the hub cannot be reached; "
            f"{why}, or download it elsewhere and pass the folder to {flag}"
        ) from error
    except Exception as error:
        # Anything else that the hub client raises (authorisation, no such id) ends
        # here: the user needs one line, and --debug keeps the chain.
        reason = one_line(error).partition(". ")[0][:120]
        raise HubError(
            f"hub id {repo_id!r} could not be fetched ({type(error).__name__}: "
            f"{reason}). Check the name, or pass a folder to {flag}"
        ) from error


def _bars(repo_id: str, reporter: Reporter) -> Any:
    """A class in place of tqdm's that tells a reporter and draws nothing.

    The client has a bar for files, and in bytes one for what is received and one for
    what is written. What is written counts: parts of a file may be on disk already.
    """
    from tqdm import tqdm

    counts = {"files": (0, 0), "bytes": (0, 0)}

    class Bar(tqdm):
        monitor_interval = 0

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            received = kwargs.get("desc") == "Downloading bytes"
            kind = "bytes" if kwargs.get("unit") == "B" else "files"
            self._counted = "" if received else kind
            quiet = {"disable": False, "leave": False, "file": io.StringIO()}
            super().__init__(*args, **{**kwargs, **quiet})
            self._count()

        def _count(self) -> None:
            if self._counted:
                counts[self._counted] = int(self.n), int(self.total or 0)

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            self._count()
            if self._counted:
                reporter.downloading(repo_id, counts["files"], counts["bytes"])
            return shown

    return Bar
