"""What a run was made with: fingerprints of files, and versions of packages."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from tpuport.core.files.sealed_json import canonical
from tpuport.core.files.stores import LeftInStore
from tpuport.errors import UsageError, WeightsError

#: Files up to this size are fingerprinted whole, larger ones by samples.
FINGERPRINT_WHOLE_BYTES = 64 << 20
_SAMPLE_BYTES = 64 << 10
_SAMPLES = 64
# Long enough for the JSON header of a sharded safetensors file.
_EDGE_BYTES = 1 << 20


def fingerprint_files(folder: Path, files: Sequence[Path]) -> str:
    """A fingerprint of the content of ``files``, wherever ``folder`` lies.

    It is a sha256 over the names relative to ``folder``, the sizes and the contents, in
    the order of the names. Files above 64 MiB are **sampled**: the first and last MiB
    and 64 evenly spaced chunks of 64 KiB, so that a checkpoint of 20 GB costs well
    under a second per file. A change inside a large file that touches no sample and
    leaves the size goes unseen; another checkpoint, another precision or a truncated
    download does not.

    Args:
        folder: what the names are relative to; links are not resolved, so that a hub
            snapshot of links has the fingerprint of the plain files.
        files: paths under ``folder``.

    Returns:
        64 hexadecimal digits.

    Raises:
        UsageError: there are no files.
        WeightsError: a file is missing or cannot be read.
    """
    if not files:
        raise UsageError(f"{folder}: there are no files to fingerprint")
    named = {file.relative_to(folder).as_posix(): file for file in files}
    digest = hashlib.sha256(b"tpuport.fingerprint.1")
    for name in sorted(named):
        try:
            size, content = _fingerprint_file(named[name])
        except OSError as error:
            raise WeightsError(
                f"{named[name]}: cannot be read: {error.strerror}"
            ) from error
        # JSON delimits the three, so that no name can imitate a size.
        digest.update(canonical([name, size, content]))
    return digest.hexdigest()


def _fingerprint_file(path: Path) -> tuple[int, str]:
    """The size of a file in bytes and the sha256 of its content or samples."""
    if (left := LeftInStore.by(path)) is not None:
        samples = left.read(_samples(left.size))
        return left.size, hashlib.sha256(b"".join(samples)).hexdigest()
    # Unbuffered: a buffer would read ahead at every sample.
    with path.open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size <= FINGERPRINT_WHOLE_BYTES:
            return size, hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        for start, end in _samples(size):
            file.seek(start)
            length = end - start
            while length > 0 and (data := file.read(length)):
                digest.update(data)
                length -= len(data)
        return size, digest.hexdigest()


def _samples(size: int) -> list[tuple[int, int]]:
    """Where the samples of a large file start and end."""
    inner = size - 2 * _EDGE_BYTES - _SAMPLE_BYTES
    starts = [_EDGE_BYTES + inner * i // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return [
        (0, _EDGE_BYTES),
        *((start, start + _SAMPLE_BYTES) for start in starts),
        (size - _EDGE_BYTES, size),
    ]


def hash_output(path: Path) -> tuple[str, int]:
    """The sha256 and the bytes of a video file, or of the frames in a PNG folder."""
    if not path.is_dir():
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256")
            return digest.hexdigest(), os.fstat(file.fileno()).st_size
    frames = sorted(path.glob("*.png"))
    parts = [(frame.name, *hash_output(frame)) for frame in frames]
    total = sum(size for _, _, size in parts)
    return hashlib.sha256(canonical(parts)).hexdigest(), total


# --- what is installed, by package metadata: nothing is imported

STACK = ("tpuport", "torch", "torchax", "jax", "jaxlib", "diffusers", "transformers")


def version(package: str) -> str | None:
    """The installed version of a package, or ``None``."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(*more: str) -> dict[str, str | None]:
    """Versions of Python, the stack and ``more`` packages."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    return found | {name: version(name) for name in (*STACK, *more)}
