"""A job of a server of `tpuport serve`, over the HTTP of docs/serve.md."""

from __future__ import annotations

import functools
import http.client
import json
import logging
import os
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

_LOG = logging.getLogger(__name__)
#: Seconds that a server may be away, as while it is started again.
PATIENCE = 600.0
#: Seconds for an answer, and for one that an interrupt waits for.
_TIMEOUT, _SHORT = 330.0, 10.0
#: Seconds between two tries, at first and at most.
_FIRST, _LONGEST = 0.5, 15.0
#: Answers of a server that is not up.
_AWAY = (502, 503, 504)
#: Answers of what stands before a server that may have done what it was asked.
_LOST = (502, 504)
#: What ends a connection that was there.
_CUT = (ConnectionResetError, BrokenPipeError, http.client.IncompleteRead)


class ServerError(RuntimeError):
    """What the server refuses, or that it cannot be reached.

    Attributes:
        lost: the server may have done what it was asked.
    """

    def __init__(self, said: str, *, away: bool = False, lost: bool = False) -> None:
        super().__init__(said)
        self.away, self.lost = away, lost


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows none: a server may name any other, which would get the key."""

    def redirect_request(self, *args: Any) -> None:
        """An answer that names another address is an error as any other."""


_OPENER = urllib.request.build_opener(_NoRedirects)


def own_server() -> str:
    """The address of TPUPORT_SERVER, which alone gets the key; empty for none."""
    return os.environ.get("TPUPORT_SERVER", "").strip()


def _place(url: str) -> tuple[Any, ...]:
    """What tells servers apart.

    Raises:
        ValueError: the port is no number.
    """
    parts = urllib.parse.urlsplit(url)
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    return parts.scheme, parts.username, parts.hostname, port, parts.path


class Server:
    """A server at ``http://HOST:PORT``.

    The key of TPUPORT_API_KEY goes to the server of TPUPORT_SERVER and to no other:
    an address comes with a workflow, which anybody may have made. Neither is a widget
    of a node: ComfyUI keeps widgets in every workflow and file.

    Args:
        on_wait: called before each new try while the server is away; may raise.
    """

    def __init__(self, url: str, on_wait: Callable[[], None]) -> None:
        self.url = _bare(url)
        if not self.url.startswith(("http://", "https://")):
            raise ServerError(f"{url!r} is no address; give http://127.0.0.1:8000")
        self._on_wait = on_wait
        self._key = ""
        try:
            if own_server() and _place(self.url) == _place(_bare(own_server())):
                self._key = os.environ.get("TPUPORT_API_KEY", "").strip()
        except ValueError as error:
            raise ServerError(f"{url!r} is no address: {error}") from None

    def create(self, fields: dict[str, Any], image: bytes | None) -> dict[str, Any]:
        """A new job; asked for again where the answer is lost, by the same key.

        An interrupt meanwhile deletes the job, or logs where the job may be.

        Args:
            image: a PNG to start from.

        Raises:
            ServerError: the request is refused, or the server cannot be reached.
        """
        if image is None:
            body, kind = json.dumps(fields).encode(), "application/json"
        else:
            body, kind = _form(fields, image)
        headers = {"Content-Type": kind, "Idempotency-Key": secrets.token_hex(16)}
        asked = functools.partial(self._ask, "videos", body, headers)
        try:
            answer = asked()
        except ServerError as error:
            if not error.lost:
                raise
            try:
                answer = self._patiently(asked)
            except BaseException as error:
                if not isinstance(error, ServerError) or error.away:
                    self._take_back(functools.partial(asked, timeout=_SHORT))
                raise
        found: dict[str, Any] = json.loads(answer)
        return found

    def _take_back(self, asked: Callable[[], bytes]) -> None:
        """Delete the job that ``asked`` answers."""
        try:
            self.delete(json.loads(asked())["id"])
        except ServerError as error:
            _LOG.warning(
                "%s; the server may have the job: GET %s/v1/videos lists the jobs, and "
                "DELETE ends one",
                *(error, self.url),
            )

    def job(self, name: str) -> dict[str, Any]:
        """A job as it is now; waits for a server that is away."""
        found: dict[str, Any] = json.loads(self._content_of(f"videos/{name}"))
        return found

    def content(self, name: str, variant: str) -> bytes:
        """A file of a job; waits for a server that is away."""
        return self._content_of(f"videos/{name}/content?variant={variant}")

    def preview(self, name: str) -> bytes | None:
        """The newest preview as a PNG; nothing where there is none."""
        try:
            return self._ask(f"videos/{name}/content?variant=preview")
        except ServerError:
            return None

    def delete(self, name: str) -> None:
        """End a job, and remove what it has made; asked once, for some seconds."""
        self._ask(f"videos/{name}", method="DELETE", timeout=_SHORT)

    def _content_of(self, path: str) -> bytes:
        return self._patiently(functools.partial(self._ask, path))

    def _patiently(self, asked: Callable[[], bytes]) -> bytes:
        began, pause = time.monotonic(), _FIRST
        while True:
            try:
                return asked()
            except ServerError as error:
                if not error.away or time.monotonic() - began > PATIENCE:
                    raise
            self._on_wait()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _ask(
        self,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] = {},
        method: str | None = None,
        timeout: float = _TIMEOUT,
    ) -> bytes:
        headers = dict(headers)
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        url = f"{self.url}/v1/{path}"
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with _OPENER.open(request, timeout=timeout) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            away, lost = error.code in _AWAY, error.code in _LOST
            raise ServerError(_told(error), away=away, lost=lost) from None
        except (ValueError, http.client.InvalidURL) as error:
            raise ServerError(f"{self.url} is no address: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            # A timeout of the connection is the reason of a URLError.
            reason = getattr(error, "reason", error)
            lost = isinstance(reason, _CUT) or isinstance(error, TimeoutError)
            said = f"{self.url} cannot be reached: {reason}"
            raise ServerError(said, away=True, lost=lost) from None


def _bare(url: str) -> str:
    """The address of a server, also named as OpenAI's clients do, with /v1."""
    return url.strip().rstrip("/").removesuffix("/v1")


def _told(error: urllib.error.HTTPError) -> str:
    """The server's own words."""
    try:
        said = str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        said = str(error.reason)
    if error.code == 401:
        said += (
            "; set TPUPORT_API_KEY, and TPUPORT_SERVER to this address, where ComfyUI "
            "is started"
        )
    elif 300 <= error.code < 400:
        said += "; redirects are not followed: give the server's own address"
    return said


def _form(fields: dict[str, Any], image: bytes) -> tuple[bytes, str]:
    """A body of multipart/form-data, and its content type."""
    mark = secrets.token_hex(16)
    parts = []
    for name, value in fields.items():
        text = value if isinstance(value, str) else json.dumps(value)
        head = f'--{mark}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
        parts.append(f"{head}{text}\r\n".encode())
    head = (
        f'--{mark}\r\nContent-Disposition: form-data; name="input_reference"; '
        'filename="image.png"\r\nContent-Type: image/png\r\n\r\n'
    )
    parts.append(head.encode() + image + f"\r\n--{mark}--\r\n".encode())
    return b"".join(parts), f"multipart/form-data; boundary={mark}"
