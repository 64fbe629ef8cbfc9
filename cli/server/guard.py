"""What stands before every request: keys, hosts, limits of bodies, and last errors."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import json
import re
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from tpuport.cli.server.messages import Refused
from tpuport.cli.server.metrics import Metrics
from tpuport.cli.shown.output import say
from tpuport.core.files.typed import read_text
from tpuport.errors import UsageError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

#: Bytes of a body, and of all bodies that are being read.
MOST_BODY, MOST_BODIES = 32 << 20, 512 << 20
#: Seconds for the next part of a body, and for all of it.
_PART, _WHOLE = 20.0, 120.0
#: Seconds in which a client takes so many bytes of what waits, or all; files go in
#: parts of as many.
_TAKEN, _LEAST = 60.0, 64 << 10
#: Under which a server reads keys, and what everybody sees.
_KEYED = "/v1"
_KEY = re.compile(r"[!-~]{8,512}")


def read_keys(file: Path) -> tuple[str, ...]:
    """The digests of the keys of a file, one key a line; # begins a comment.

    Raises:
        UsageError: it cannot be read, or a line is no key.
    """
    lines = read_text(file, "--api-key-file").splitlines()
    keys = [line.strip() for line in lines]
    keys = [key for key in keys if key and not key.startswith("#")]
    for number, key in enumerate(keys, 1):
        if not _KEY.fullmatch(key):
            raise UsageError(
                f"--api-key-file {file}: key {number} is no key; give 8 to 512 letters,"
                " digits and signs without a space"
            )
    if not keys:
        raise UsageError(f"--api-key-file {file}: holds no key; write one on a line")
    return tuple(dict.fromkeys(map(_digest, keys)))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


class Guard:
    """Passes on what may pass.

    Args:
        app: what answers.
        keys: digests of the keys; empty to ask for none.
        local: only names of this machine are hosts, so that no page of another site
            reaches the server by a name of its own.
        names: other names of the server, as before a proxy on this machine.
    """

    def __init__(
        self,
        app: App,
        *,
        keys: tuple[str, ...],
        local: bool,
        metrics: Metrics,
        names: tuple[str, ...] = (),
    ) -> None:
        self._app, self._keys, self._local = app, keys, local
        self._metrics = metrics
        self._names = tuple(name.lower() for name in names)
        self._held = 0  # bytes of bodies that are being read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As of ASGI."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        begun = False

        async def sent(message: MutableMapping[str, Any]) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self._metrics.answered(scope["method"], message["status"])
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        body = _Body(self, receive)
        try:
            scope["owner"] = self._owner(scope)
            body.announced(_headers(scope).get("content-length", "0"))
            await self._app(scope, body, sent)
        except Refused as refused:
            if not begun:
                await _answer(sent, refused)
        except Exception as error:
            # A client that has gone away is no fault of the server.
            if type(error).__name__ != "ClientDisconnect":
                say(f"error: {scope['method']}: {type(error).__name__}: {error!s:.300}")
                if not begun:
                    await _answer(sent, Refused(500, "the server has failed"))
        finally:
            self._held -= body.size

    def take(self, size: int) -> None:
        """Note bytes of a body.

        Raises:
            Refused: all bodies together are too large.
        """
        self._held += size
        if self._held > MOST_BODIES:
            raise Refused(503, "too much is being uploaded; try again later")

    def _owner(self, scope: Scope) -> str:
        """The digest of the key of a request.

        Raises:
            Refused: there is no such key, or the request comes from another site.
        """
        headers = _headers(scope)
        host = _name(f"//{headers.get('host', '')}")
        if self._local and not is_loopback(host) and host not in self._names:
            message = (
                f"this server has no name {host[:100]!r}; the server's --name gives one"
            )
            raise Refused(403, message)
        origin = headers.get("origin")
        if origin is not None and scope["method"] not in ("GET", "HEAD"):
            place = ""
            with contextlib.suppress(ValueError):
                place = urllib.parse.urlsplit(origin).netloc
            own = place.lower() == headers.get("host", "").lower()
            # A proxy may pass a name of this machine on, and the page has the other.
            if not own and _name(f"//{place}") not in self._names:
                raise Refused(403, "the request comes from a page of another site")
        if not self._keys:
            return ""
        path = scope["path"]
        if path != _KEYED and not path.startswith(f"{_KEYED}/"):
            return ""
        kind, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip())
        found = [one for one in self._keys if hmac.compare_digest(one, given)]
        if kind.lower() != "bearer" or not found:
            raise Refused(401, "a key is needed: Authorization: Bearer KEY")
        return found[0]


#: Of every answer: pages show nothing of it as something else.
_HEADERS = [(b"x-content-type-options", b"nosniff")]


class PatientProtocol(H11Protocol):
    """A connection that ends where no request comes, or no answer is taken.

    Uvicorn waits without end for the head of a request, for a body that is answered
    already, and for a client that reads slowly.
    """

    _due: asyncio.TimerHandle | None = None
    _taken: asyncio.TimerHandle | None = None
    _left = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        # Whatever the kernel does not take at once pauses.
        transport.set_write_buffer_limits(high=0)
        self._due = self.loop.call_later(_PART, self._silent)

    def data_received(self, data: bytes) -> None:
        """Go on to wait, once, where the data begin no request."""
        super().data_received(data)
        if not self._idle:
            _cancel(self._due)
            self._due = None
        elif self._due is None:
            self._due = self.loop.call_later(_PART, self._silent)

    def pause_writing(self) -> None:
        """Begin to wait until the client takes what was sent."""
        super().pause_writing()
        self._wait()

    def _wait(self) -> None:
        self._left = self.transport.get_write_buffer_size()
        self._taken = self.loop.call_later(_TAKEN, self._look)

    def _look(self) -> None:
        if self._left - self.transport.get_write_buffer_size() < _LEAST:
            self.transport.abort()
        else:
            self._wait()

    def resume_writing(self) -> None:
        """The client has taken all, or has gone."""
        super().resume_writing()
        _cancel(self._taken)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing any more."""
        super().connection_lost(exc)
        _cancel(self._due)
        _cancel(self._taken)

    @property
    def _idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _silent(self) -> None:
        self._due = None
        if self._idle:
            self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


class _Body:
    """Gives out the parts of a body, within limits of size and time."""

    def __init__(self, guard: Guard, receive: Receive) -> None:
        self._guard, self._receive = guard, receive
        self.size = 0
        self._since = time.monotonic()
        self._whole = False

    def announced(self, length: str) -> None:
        """Refuse a body by what its head says."""
        if length.isdecimal() and int(length[:20]) > MOST_BODY:
            raise _too_large()

    async def __call__(self) -> MutableMapping[str, Any]:
        if self._whole:  # what comes now is the end of the connection
            return await self._receive()
        left = self._since + _WHOLE - time.monotonic()
        try:
            message = await asyncio.wait_for(self._receive(), min(_PART, max(left, 0)))
        except TimeoutError:
            raise Refused(408, "the body came too slowly") from None
        size = len(message.get("body", b""))
        self.size += size
        self._guard.take(size)
        if self.size > MOST_BODY:
            raise _too_large()
        self._whole = not message.get("more_body", False)
        return message


def _too_large() -> Refused:
    return Refused(413, f"the body has more than {MOST_BODY} bytes")


def _headers(scope: Scope) -> Mapping[str, str]:
    return {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}


def _name(address: str) -> str:
    with contextlib.suppress(ValueError):
        return urllib.parse.urlsplit(address).hostname or ""
    return ""


async def _answer(send: Send, refused: Refused) -> None:
    data = json.dumps(refused.body()).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(data)).encode()),
        (b"connection", b"close"),
    ]
    start = {"type": "http.response.start", "status": refused.status}
    with contextlib.suppress(OSError):
        await send({**start, "headers": headers})
        await send({"type": "http.response.body", "body": data})
