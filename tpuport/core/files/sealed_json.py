"""Versioned JSON documents with a checksum: ``run.json`` and the sidecar of a video.

A document is used only when it is of the schema and version that is asked for and is
what was written; anything else is refused by name with
:class:`~tpuport.errors.ArtifactError`, in one line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from tpuport.core.files.atomic import atomic_write_bytes
from tpuport.core.files.stores import AnyPath, StorePath
from tpuport.core.files.typed import read_json
from tpuport.errors import ArtifactError, MissingArtifactError

P = TypeVar("P", Path, StorePath, AnyPath)

#: Raised when the meaning of a field of any of them changes.
SCHEMA_VERSION = 2
SIDECAR_SCHEMA = "tpuport.sidecar"

_CHECKSUM = "checksum"
_ENVELOPE = ("schema", "schema_version", _CHECKSUM)


def canonical(value: Any) -> bytes:
    """The one spelling of a JSON value that checksums are taken of."""
    return json.dumps(
        value,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    ).encode()


def document_checksum(document: Mapping[str, Any]) -> str:
    """The checksum over all of a document but its checksum."""
    content = {key: value for key, value in document.items() if key != _CHECKSUM}
    return "sha256:" + hashlib.sha256(canonical(content)).hexdigest()


def document_bytes(schema: str, content: Mapping[str, Any]) -> bytes:
    """A versioned JSON file; see :func:`read_document`."""
    document = {"schema": schema, "schema_version": SCHEMA_VERSION, **content}
    sealed = {**document, _CHECKSUM: document_checksum(document)}
    return json.dumps(sealed, indent=2, ensure_ascii=False).encode() + b"\n"


def write_document(path: Path, schema: str, content: Mapping[str, Any]) -> None:
    """Write :func:`document_bytes`, whole or not at all."""
    atomic_write_bytes(path, document_bytes(schema, content))


def read_document(path: AnyPath, schema: str, remedy: str) -> dict[str, Any]:
    """The content of a versioned JSON file, without its envelope.

    Raises:
        MissingArtifactError: it is not there.
        ArtifactError: it is truncated, of another schema or version, or not what was
            written.
        StoreError: it cannot be read in a store.
    """
    try:
        document = read_json(path, ArtifactError, remedy)
    except FileNotFoundError:
        raise MissingArtifactError(f"{path}: is missing; {remedy}") from None
    found = document.get("schema") if isinstance(document, dict) else None
    if found != schema:
        raise ArtifactError(
            f"{path}: has schema {show(found)}, not {show(schema)}; {remedy}"
        )
    version = document.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        newer = isinstance(version, int) and version > SCHEMA_VERSION
        raise ArtifactError(
            f"{path}: has schema_version {show(version)}, and this tpuport reads"
            f" {SCHEMA_VERSION}; "
            + (f"update tpuport, or {remedy}" if newer else remedy)
        )
    try:
        intact = document.get(_CHECKSUM) == document_checksum(document)
    except (ValueError, RecursionError):  # NaN, which Python reads and JSON lacks
        intact = False
    if not intact:
        raise ArtifactError(
            f"{path}: was altered after it was written (its checksum does not match);"
            f" {remedy}"
        )
    return {key: value for key, value in document.items() if key not in _ENVELOPE}


def show(value: Any) -> str:
    """A JSON value on one line; ``None`` reads as "none"."""
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def sidecar_path(video: P) -> P:
    """Where the JSON beside a video lies: ``a.mp4`` -> ``a.mp4.json``.

    A folder of frames ``a`` gives ``a.png.json``, so that no name gives ``run.json``.
    """
    return video.with_name(video.name + (".json" if video.suffix else ".png.json"))


def sidecar_bytes(data: Mapping[str, Any]) -> bytes:
    """The JSON that lies beside a video and says how it was made."""
    return document_bytes(SIDECAR_SCHEMA, data)


def read_sidecar(path: AnyPath) -> dict[str, Any]:
    """The data of a sidecar, as it was given to :func:`sidecar_bytes`.

    Raises:
        ArtifactError: the file is missing, truncated, of another schema or version, or
            altered.
    """
    remedy = "use the file as `tpuport` wrote it, or make the video again"
    return read_document(path, SIDECAR_SCHEMA, remedy)
