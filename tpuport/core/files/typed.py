"""What is read from files: bounded in size, and of the form that a type says.

Every record, sidecar, manifest, seal and config comes in through :func:`read_json`, and
every one that tpuport wrote is held against its type by :func:`checked`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Hashable
from typing import IO, Any, Literal, Protocol, TypeVar, cast

from tpuport.core.files.atomic import one_line
from tpuport.errors import ArtifactError, TpuportError, UsageError

T = TypeVar("T")

#: No record, config or index is near this.
LIMIT_BYTES = 16 << 20
_SHOWN = 60


class Readable(Protocol):
    """A path, of this machine or of a store."""

    def open(self, mode: Literal["rb"], /) -> IO[bytes]:
        """The content."""


def read_json(path: Readable, error: type[TpuportError], remedy: str) -> Any:
    """The JSON in a file.

    Args:
        error: raised for what is no JSON.
        remedy: the end of a message: what to do.

    Raises:
        FileNotFoundError: there is no such file.
        TpuportError: ``error``: the file is too large, is cut short, is nested too
            deeply, is no JSON or cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT_BYTES + 1)
        if len(raw) > LIMIT_BYTES:
            found = f"is larger than {LIMIT_BYTES >> 20} MiB, which no such file is"
        else:
            return json.loads(raw)
    except FileNotFoundError:
        raise
    except OSError as failed:
        found = f"cannot be read: {failed.strerror}"
    except UnicodeDecodeError:
        found = "is not JSON, nor any text"
    except (ValueError, RecursionError) as failed:
        found = f"is not JSON, or is cut short ({one_line(failed)})"
    raise error(f"{path}: {found}; {remedy}")


def read_text(path: Readable, what: str, errors: str = "strict") -> str:
    """The text of a file that the user named.

    Args:
        errors: as of ``bytes.decode``.

    Raises:
        UsageError: it does not exist, cannot be read, is too large, or is not UTF-8.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(LIMIT_BYTES + 1)
        if len(raw) > LIMIT_BYTES:
            raise UsageError(
                f"{what} {path} is larger than {LIMIT_BYTES >> 20} MiB; name a smaller "
                "file"
            )
        return raw.decode("utf-8-sig", errors)
    except FileNotFoundError:
        raise UsageError(f"{what} {path} does not exist; check the name") from None
    except OSError as error:
        raise UsageError(
            f"{what} {path} cannot be read: {error.strerror}; name a file that can be "
            "read"
        ) from error
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} is not UTF-8 text; save it as UTF-8") from None


def checked(
    kind: type[T],
    value: Any,
    file: object,
    remedy: str,
    *,
    at: str = "",
    extra: Literal["forbid", "ignore", "allow"] = "forbid",
) -> T:
    """A JSON value as ``kind``: a TypedDict, a data class or any type of pydantic's.

    Nothing is converted but what JSON has no word for: lists become tuples, words
    become members of an enum.

    Args:
        value: as read from JSON.
        file: what the value was read from, for messages.
        remedy: the end of a message: what to do.
        at: the field of the file that the value is.
        extra: what becomes of fields that ``kind`` does not have.

    Raises:
        ArtifactError: the first field that is wrong, and what was found there.
    """
    from pydantic import ValidationError

    try:
        found: T = _adapter(cast(Hashable, kind)).validate_json(
            json.dumps(value), strict=True, extra=extra
        )
        return found
    except ValidationError as error:
        first, *more = error.errors(include_url=False)
    cause = first.get("ctx", {}).get("error")
    words = one_line(cause or first["msg"])
    field = ".".join(filter(None, (at, *map(str, first["loc"]))))
    named = f"has no usable {field or 'content'} ({words}"
    if cause is None and first["type"] != "missing":
        named += f", found {_short(first['input'])}"
    others = f"; {len(more)} more" if more else ""
    raise ArtifactError(f"{file}: {named}{others}); {remedy}")


@functools.cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
