"""Object stores: outputs that are put there whole, and folders that are fetched once.

fsspec's packages do the work, and find credentials and endpoints in their own ways. An
object appears under its name whole or not at all, as stores have it.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
import hashlib
import io
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from tpuport.core.files.atomic import (
    TEMPORARY,
    atomic_write_bytes,
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
    damaged,
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

    def size(self) -> int | None:
        """The bytes of the object; ``None`` if there is none. A folder is none."""
        with self._store("looked up") as store:
            try:
                about = store.info(self.key)
            except FileNotFoundError:
                return None
            return int(about["size"]) if about["type"] == "file" else None

    def exists(self) -> bool:
        """Whether there is an object of this name."""
        return self.size() is not None

    def files(self) -> dict[str, tuple[int, str]]:
        """The objects under a folder: bytes, and what changes with the content."""
        with self._store("listed") as store:
            found = store.find(self.key, detail=True)
        start = len(self.key) + 1
        return {
            about["name"].lstrip("/")[start:]: _state(about)
            for about in found.values()
            if about["name"].lstrip("/")[start:]
        }

    def read_bytes(self) -> bytes:
        """The content of the object.

        Raises:
            FileNotFoundError: there is none.
        """
        with (
            self._store("read") as store,
            contextlib.suppress(FileNotFoundError),
        ):
            return bytes(store.cat_file(self.key))
        raise FileNotFoundError(str(self))

    def open(self, mode: str) -> io.BytesIO:
        """The content, to be read as that of a file."""
        return io.BytesIO(self.read_bytes())

    def write_bytes(self, data: bytes, *, replace: bool = True) -> None:
        """Put an object in place of what is there.

        Raises:
            FileExistsError: the object is there, and may not be replaced.
        """
        with self._store("written") as store:
            mode = "overwrite" if replace else "create"
            store.pipe_file(self.key, data, mode=mode)

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


def _state(about: dict[str, Any]) -> tuple[int, str]:
    """The size of an object, and the etag or what stands for one."""
    names = ("etag", "ETag", "md5Hash", "LastModified", "created")
    mark = str(next(about[name] for name in names if about.get(name)))
    return int(about["size"]), mark


#: Longest header that safetensors takes.
_LONGEST = 100_000_000
#: How the file begins that stands for an object. As the length of a header, by which a
#: safetensors file begins, no file could hold it: every other reader refuses the file.
_LEFT = b'{"left":'


@dataclass(frozen=True, kw_only=True)
class LeftInStore:
    """A safetensors object that stays in its store, and is read in ranges.

    A file of this machine stands for the object, and has the header alone.

    Attributes:
        size: bytes of the object.
        mark: what changes with the content.
        header: the first bytes, before those of the tensors.
    """

    address: StorePath
    size: int
    mark: str
    header: bytes

    @classmethod
    def at(cls, address: StorePath) -> LeftInStore:
        """The object at an address, as it is now.

        Raises:
            WeightsError: it is no safetensors file.
            StoreError: as of :meth:`read`.
        """
        with address._store("read") as store:
            size, mark = _state(store.info(address.key))
        one = cls(address=address, size=size, mark=mark, header=b"")
        (first,) = one.read([(0, 8)])
        end = 8 + int.from_bytes(first, "little")
        if not 8 < end <= min(size, 8 + _LONGEST):
            raise damaged(f"{address} is truncated or not a safetensors file")
        (header,) = one.read([(8, end)])
        return replace(one, header=first + header)

    @classmethod
    def by(cls, file: Path) -> LeftInStore | None:
        """The object that a file stands for; ``None`` of a file of its own."""
        with file.open("rb") as stream:
            if stream.read(len(_LEFT)) != _LEFT:
                return None
            stream.seek(0)
            found = json.load(stream)
        address = StorePath(*found["left"])
        header = found["header"].encode("latin-1")
        return cls(
            address=address, size=found["size"], mark=found["mark"], header=header
        )

    def note(self, file: Path) -> None:
        """Let a file stand for the object."""
        about = {
            "left": [self.address.scheme, self.address.key],
            "size": self.size,
            "mark": self.mark,
            "header": self.header.decode("latin-1"),
        }
        atomic_write_bytes(file, json.dumps(about, separators=(",", ":")).encode())

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """The bytes between some starts and ends, all requests in flight together.

        Raises:
            StoreError: the store does not answer, or the object is another one since.
        """
        starts, ends = ([*each] for each in zip(*ranges, strict=True))
        with self.address._store("read") as store:
            try:
                keys = [self.address.key] * len(starts)
                found = store.cat_ranges(keys, starts, ends, on_error="raise")
            except Exception:
                self._check_same(store)
                raise
            self._check_same(store)
        return [bytes(one) for one in found]

    def _check_same(self, store: Any) -> None:
        now = None
        with contextlib.suppress(FileNotFoundError):
            now = _state(store.info(self.address.key))
        if now != (self.size, self.mark):
            what = "is gone" if now is None else "has changed"
            raise StoreError(
                f"{self.address}: {what} since its header was read; let the folder be "
                "as it is while a run reads it, and run again"
            )


def fetched(
    folder: StorePath,
    patterns: Sequence[str],
    cache: Path,
    reporter: Reporter,
    largest: int | None = None,
) -> Path:
    """The objects of a folder whose names match, as a folder of the cache.

    An object whose size and etag are those of the last time is not fetched again.

    Args:
        cache: the cache folder.
        reporter: told of the files and the bytes that have come.
        largest: bytes of a safetensors file that is fetched; of a larger one that is
            not here, the header alone. See :class:`LeftInStore`.

    Raises:
        MissingStoreError: the store has nothing in the folder.
        StoreError: an object cannot be fetched.
        WriteError: the cache cannot be written.
    """
    local = local_of(folder, cache / FETCHED)
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
        check_within(folder, wanted)
        for file in [file for file in local.rglob("*") if file.is_file()]:
            name = file.relative_to(local).as_posix()
            under_way = file.name.startswith(TEMPORARY)
            if _matches(name, patterns) and name not in wanted and not under_way:
                file.unlink(missing_ok=True)
        old = [n for n, v in wanted.items() if not _same(local / n, v, known.get(n))]
        left = [n for n in old if _large(n, wanted[n][0], largest)]
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda name: _leave(folder / name, local / name), left))
        old = [name for name in old if name not in left]
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


def check_within(folder: StorePath, names: Iterable[str]) -> None:
    """Refuse names of a store that would be files elsewhere on this machine.

    Raises:
        StoreError: there is such a name.
    """
    for name in names:
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise StoreError(f"{folder / name}: this name leaves the folder")


def begun(
    folder: AnyPath, patterns: Sequence[str], cache: Path, reporter: Reporter
) -> tuple[Path, dict[str, int]]:
    """A folder of this machine to write to, and when each of its files changed.

    For a store the folder is in the cache, with what the store has. :func:`ended` puts
    what is new there into the store. Else the folder itself, and nothing is noted.
    """
    if isinstance(folder, Path):
        return folder, {}
    local = local_of(folder, cache / FETCHED)
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


def local_of(folder: StorePath, within: Path) -> Path:
    """The folder of this machine for what belongs to a folder of a store."""
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:12]
    return within / f"{folder.key.replace('/', '-')[-80:]}-{digest}"


def _large(name: str, size: int, largest: int | None) -> bool:
    return largest is not None and name.endswith(".safetensors") and size > largest


def _leave(address: StorePath, file: Path) -> None:
    """Let a file stand for an object."""
    file.parent.mkdir(parents=True, exist_ok=True)
    LeftInStore.at(address).note(file)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _same(file: Path, now: tuple[int, str], before: Any) -> bool:
    """Whether a file is what was fetched, and the object is so still."""
    there = file.is_file() and file.stat().st_size == now[0]
    return there and before == list(now)
