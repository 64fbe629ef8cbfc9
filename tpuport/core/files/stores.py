"""Object stores: outputs that are put there whole, and folders that are fetched once.

fsspec's packages do the work, and find credentials and endpoints in their own ways. An
object appears under its name whole or not at all, as stores have it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from tpuport.core.files.atomic import (
    TEMPORARY,
    atomic_write_json,
    cannot_write,
    no_room,
    one_line,
    temporary_beside,
)
from tpuport.core.files.typed import read_json
from tpuport.core.reports import Reporter
from tpuport.errors import (
    ArtifactError,
    MissingStoreError,
    StoreError,
    TpuportError,
    UsageError,
    quoted,
)

#: Known schemes -> fsspec's package, and the extra that installs the package.
SCHEMES = {"gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}

#: Of a cache folder: what was fetched.
FETCHED = "stores"

#: What has a scheme. One letter is a drive of Windows.
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+):/", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StorePath:
    """The address of an object, or of a folder of objects.

    Attributes:
        scheme: one of :data:`SCHEMES`.
        key: bucket and name, such as ``bucket/folder/fox.mp4``.
    """

    scheme: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    @property
    def name(self) -> str:
        """As of a path; empty for a bucket."""
        return PurePosixPath(self.key).name if "/" in self.key else ""

    @property
    def stem(self) -> str:
        """As of a path."""
        return PurePosixPath(self.name).stem

    @property
    def suffix(self) -> str:
        """As of a path."""
        return PurePosixPath(self.name).suffix

    @property
    def parent(self) -> StorePath:
        """The folder, or the bucket."""
        return StorePath(self.scheme, self.key.rpartition("/")[0])

    def with_name(self, name: str) -> StorePath:
        """Another object of the folder."""
        return self.parent / name

    def __truediv__(self, name: str) -> StorePath:
        return StorePath(self.scheme, f"{self.key}/{name}")

    @contextlib.contextmanager
    def _store(self, what: str) -> Iterator[Any]:
        """fsspec's file system; whatever it raises in the block is one line.

        Args:
            what: cannot be done, if so.
        """
        package, extra = SCHEMES[self.scheme]
        try:
            import fsspec

            yield fsspec.filesystem(self.scheme, use_listings_cache=False)
        except (TpuportError, FileExistsError):
            raise
        except ImportError as error:
            raise UsageError(
                f"{self}: {self.scheme}:// needs a package: pip install "
                f"'tpuport[{extra}]'"
            ) from error
        except Exception as error:  # each package has its own kinds
            if no_room(error):  # of this machine
                raise
            reason = one_line(error)[:120] or "no reason given"
            raise StoreError(
                f"{self}: cannot be {what} ({type(error).__name__}: {reason}); check "
                f"the bucket, and the credentials as {package} finds them"
            ) from error

    def check_writable(self) -> None:
        """Put an empty object into the folder and remove it again, once in a process.

        Raises:
            UsageError: a package is missing.
            StoreError: there is no such bucket, or it may not be written.
        """
        _probe(self)

    def exists(self) -> bool:
        """Whether there is an object of this name; a folder is none."""
        with self._store("looked up") as store:
            try:
                return bool(store.info(self.key)["type"] == "file")
            except FileNotFoundError:
                return False

    def files(self) -> dict[str, tuple[int, str]]:
        """The objects under a folder: bytes, and what changes with the content."""
        with self._store("listed") as store:
            found = store.find(self.key, detail=True)
        start = len(self.key) + 1
        return {
            about["name"].lstrip("/")[start:]: (int(about["size"]), _mark(about))
            for about in found.values()
            if about["name"].lstrip("/")[start:]
        }

    def read_bytes(self) -> bytes:
        with self._store("read") as store:
            return bytes(store.cat_file(self.key))

    def write_bytes(self, data: bytes) -> None:
        """Put an object in place of what is there."""
        with self._store("written") as store:
            store.pipe_file(self.key, data)

    def put(self, file: Path, *, replace: bool = True) -> None:
        """Put a file.

        Raises:
            FileExistsError: the object is there, and may not be replaced.
        """
        with self._store("written") as store:
            mode = "overwrite" if replace else "create"
            store.put_file(str(file), self.key, mode=mode)

    def get(self, file: Path) -> None:
        """Get the object as a file, whole."""
        temporary = temporary_beside(file)
        try:
            with self._store("fetched") as store:
                store.get_file(self.key, str(temporary))
            os.replace(temporary, file)
        finally:
            temporary.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the object, if there is one."""
        with self._store("removed") as store, contextlib.suppress(FileNotFoundError):
            store.rm_file(self.key)


#: A place on this machine or in a store.
AnyPath = Path | StorePath


def place(text: str) -> AnyPath:
    """The place that a text names.

    Raises:
        UsageError: it looks like an address and is none of a known store.
    """
    found = _ADDRESS.match(text)
    if found is None and not text.startswith(tuple(f"{name}:" for name in SCHEMES)):
        return Path(text).expanduser()
    scheme, _, key = text.partition("://")
    key = key.rstrip("/")
    known = " and ".join(f"{name}://" for name in SCHEMES)
    if scheme not in SCHEMES:
        raise UsageError(
            f"{quoted(text)} is no address of a known store; {known} are known, such "
            f"as {next(iter(SCHEMES))}://bucket/folder"
        )
    if any(part in ("", ".", "..") for part in key.split("/")):
        raise UsageError(
            f"{quoted(text)} is no address: a bucket and names are needed, such as "
            f"{scheme}://bucket/folder"
        )
    return StorePath(scheme, key)


def from_anywhere(text: str) -> str:
    """A place as a text that does not depend on the current folder.

    A slash at the end stays: it asks for a folder.
    """
    found = place(text)
    there = found if isinstance(found, StorePath) else Path(text).absolute()
    return f"{there}{'/' * text.endswith('/')}"


@functools.cache
def _probe(folder: StorePath) -> None:
    probe = folder / f"{TEMPORARY}{secrets.token_hex(8)}"
    with folder._store("written") as store:
        store.pipe_file(probe.key, b"")
    with contextlib.suppress(StoreError):  # some may write and not remove
        probe.remove()


def _mark(about: dict[str, Any]) -> str:
    """What a store says of an object's content: the etag, or what stands for one."""
    names = ("etag", "ETag", "md5Hash", "LastModified", "created")
    return str(next(about[name] for name in names if about.get(name)))


def fetched(
    folder: StorePath, patterns: Sequence[str], cache: Path, reporter: Reporter
) -> Path:
    """The objects of a folder whose names match, as a folder of the cache.

    An object whose size and etag are those of the last time is not fetched again.

    Args:
        cache: the cache folder.
        reporter: told of the files and the bytes that have come.

    Raises:
        MissingStoreError: the store has nothing in the folder.
        StoreError: an object cannot be fetched.
        WriteError: the cache cannot be written.
    """
    local = _local(folder, cache)
    notes = local.with_name(f"{local.name}.json")
    there = folder.files()
    if not there:
        raise MissingStoreError(f"{folder} does not exist: the store has nothing there")
    try:
        local.mkdir(parents=True, exist_ok=True)
        known = {}
        with contextlib.suppress(FileNotFoundError, ArtifactError):
            known = dict(read_json(notes, ArtifactError, ""))
        wanted = {n: v for n, v in there.items() if _matches(n, patterns)}
        for name in wanted:
            if not {"", ".", ".."}.isdisjoint(name.split("/")):
                raise StoreError(f"{folder / name}: this name leaves the folder")
        for file in [file for file in local.rglob("*") if file.is_file()]:
            name = file.relative_to(local).as_posix()
            under_way = file.name.startswith(TEMPORARY)
            if _matches(name, patterns) and name not in wanted and not under_way:
                file.unlink(missing_ok=True)
        old = [n for n, v in wanted.items() if not _same(local / n, v, known.get(n))]
        total = sum(wanted[name][0] for name in old)
        come, what = 0, f"downloading {folder}"
        with reporter.timed(what) if old else contextlib.nullcontext():
            for number, name in enumerate(old):
                told = (number, len(old)), (come, total)
                reporter.downloading(str(folder), *told)
                (local / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).get(local / name)
                known[name] = list(wanted[name])
                atomic_write_json(notes, known)
                come += wanted[name][0]
    except OSError as error:
        raise cannot_write(local, error) from error
    return local


def begun(
    folder: AnyPath, patterns: Sequence[str], cache: Path, reporter: Reporter
) -> tuple[Path, dict[str, int]]:
    """A folder of this machine to write to, and when each of its files changed.

    For a store the folder is in the cache, with what the store has. :func:`ended` puts
    what is new there into the store. Else the folder itself, and nothing is noted.
    """
    if isinstance(folder, Path):
        return folder, {}
    local = _local(folder, cache)
    try:
        fetched(folder, patterns, cache, reporter)
    except MissingStoreError:
        shutil.rmtree(local, ignore_errors=True)
    return local, _changed(local)


def ended(folder: AnyPath, local: Path, before: dict[str, int], last: str) -> None:
    """Put what changed since :func:`begun` into the store, and remove what is gone.

    Args:
        last: the file that names the others, which is put after these.
    """
    if isinstance(folder, Path):
        return
    now = _changed(local)
    for name in sorted(now, key=lambda name: name == last):
        if now[name] != before.get(name):
            (folder / name).put(local / name)
    for name in before.keys() - now.keys():
        (folder / name).remove()


def _changed(folder: Path) -> dict[str, int]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {f.relative_to(folder).as_posix(): f.stat().st_mtime_ns for f in files}


def _local(folder: StorePath, cache: Path) -> Path:
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    return cache / FETCHED / f"{folder.key.replace('/', '-')[-80:]}-{digest}"


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _same(file: Path, now: tuple[int, str], before: Any) -> bool:
    """Whether a file is what was fetched, and the object is so still."""
    there = file.is_file() and file.stat().st_size == now[0]
    return there and before == list(now)
