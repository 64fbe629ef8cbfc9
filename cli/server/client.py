"""What a client says to a server of videos: docs/serve.md has the contract."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import httpx

from tpuport.errors import ServerError, TpuportError, UsageError, quoted

T = TypeVar("T")

#: Seconds that a server may be silent, as while it is started again.
PATIENCE = 600.0
#: Seconds between two tries, at first and at most.
_FIRST, _LONGEST = 0.5, 15.0
#: Seconds for a connection, and for an answer: a request is checked before the queue,
#: and the first check waits for imports.
_TIMEOUTS = httpx.Timeout(330.0, connect=10.0)
#: Answers of a server that is not up.
_AWAY = (502, 503, 504)
#: Answers of what stands before a server that may have done what it was asked.
_LOST = (502, 504)


class Server:
    """A server at ``http://HOST:PORT``, also named as OpenAI's clients do, with /v1.

    Args:
        url: its address.
        key: is sent as ``Authorization: Bearer KEY``; empty for none.
        on_silence: called before each new try, with the seconds to the try.

    Raises:
        UsageError: ``url`` is no address of a server.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        on_silence: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._on_silence = on_silence
        try:
            found = httpx.URL(self.url)
            if found.scheme not in ("http", "https") or not found.host:
                raise UsageError(
                    f"--server {quoted(url)}: is no address; give one such as "
                    "http://127.0.0.1:8000"
                )
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            self._http = httpx.Client(
                base_url=f"{self.url}/v1/", headers=headers, timeout=_TIMEOUTS
            )
        except (httpx.InvalidURL, UnicodeEncodeError) as error:
            raise UsageError(
                f"--server {quoted(url)}, or the key: {error}; give "
                "http://HOST:PORT, and a key of ASCII characters"
            ) from error

    def create(self, fields: Mapping[str, Any], image: Path | None) -> dict[str, Any]:
        """A new job; asked for again where the answer is lost, by the same key.

        Args:
            fields: of the request, as docs/serve.md has them.
            image: the file to start from.

        Raises:
            UsageError: the server refuses the request.
            ServerError: it cannot be reached, or cannot take the job. A note says
                where the server may have taken the job; so it does after a signal.
        """
        own = {"Idempotency-Key": secrets.token_hex(16)}

        def post(**given: Any) -> dict[str, Any]:
            return self._asked(lambda: self._http.post("videos", headers=own, **given))

        def once() -> dict[str, Any]:
            if image is None:
                return post(json=dict(fields))
            form = {name: _in_form(value) for name, value in fields.items()}
            with image.open("rb") as file:
                return post(data=form, files={"input_reference": (image.name, file)})

        lost = False
        try:
            try:
                return once()
            except ServerError as error:
                if not (lost := error.lost):
                    raise
            return self.patiently(once)
        except BaseException as error:
            away = lost and isinstance(error, ServerError) and error.away
            if away or not isinstance(error, TpuportError):
                error.add_note(
                    f"the server may have the job; GET {self.url}/v1/videos lists the "
                    "jobs, and DELETE ends one"
                )
            raise

    def job(self, name: str) -> dict[str, Any]:
        """A job as it is now; waits for a server that is away."""
        return self.patiently(
            lambda: self._asked(lambda: self._http.get(f"videos/{name}"))
        )

    def download(self, name: str, variant: str, index: int, into: Path) -> None:
        """Write a video of a job, or what belongs to the video, into a file.

        Raises:
            OSError: the file cannot be written.
        """

        def once() -> None:
            asked: dict[str, str | int] = {"variant": variant, "index": index}
            path = f"videos/{name}/content"
            try:
                with (
                    self._http.stream("GET", path, params=asked) as answer,
                    into.open("wb") as file,
                ):
                    if answer.is_error:
                        answer.read()
                    self._checked(answer)
                    for part in answer.iter_bytes():
                        file.write(part)
            except httpx.TransportError as error:
                raise self._unreachable(error) from error

        self.patiently(once)

    def delete(self, name: str) -> None:
        """End a job; asked once, and only for some seconds."""
        self._asked(lambda: self._http.delete(f"videos/{name}", timeout=5.0))

    def patiently(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, tried again while the server is away.

        Raises:
            ServerError: it was away for ``PATIENCE`` seconds.
        """
        began, pause = time.monotonic(), _FIRST
        while True:
            try:
                return call()
            except ServerError as error:
                if not error.away or time.monotonic() - began + pause > PATIENCE:
                    raise
            self._on_silence(pause)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)

    def _asked(self, call: Callable[[], httpx.Response]) -> dict[str, Any]:
        try:
            answer = self._checked(call())
        except httpx.TransportError as error:
            raise self._unreachable(error) from error
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ServerError(
                f"{self.url}: answers no JSON; is it a server of `tpuport serve`?"
            )
        return found

    def _unreachable(self, error: httpx.TransportError) -> ServerError:
        reason = _printable(str(error)) or type(error).__name__
        if isinstance(error, httpx.RemoteProtocolError) and "illegal" in reason:
            return ServerError(
                f"{self.url}: answers no HTTP; is it a server of `tpuport serve`?"
            )
        return ServerError(
            f"{self.url}: cannot be reached ({reason}); look at --server, and whether "
            "the server runs",
            away=True,
            lost=not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout),
        )

    def _checked(self, answer: httpx.Response) -> httpx.Response:
        """The answer, if the server does as it is asked."""
        if answer.is_success:
            return answer
        try:
            told = answer.json()["error"]
            said, param = str(told["message"]), told.get("param")
        except (ValueError, LookupError, TypeError, AttributeError):
            said, param = answer.reason_phrase, None
        said = _printable(said)
        code = answer.status_code
        if code == 401:
            raise UsageError(
                f"{self.url}: {said}; give a key by --api-key-file, or by "
                "TPUPORT_API_KEY"
            )
        if code in (400, 413, 422):
            where = f"{_printable(str(param))}: " if param else ""
            told_already = where and said.startswith(where.removesuffix(": "))
            raise UsageError(said if told_already else where + said)
        raise ServerError(
            f"{self.url}: {code}, {said}", away=code in _AWAY, lost=code in _LOST
        )


def _in_form(value: Any) -> str:
    """A field as text: what is no text is JSON."""
    return value if isinstance(value, str) else json.dumps(value)


def _printable(text: str) -> str:
    """Text of another machine, without what moves a terminal's cursor."""
    return "".join(c if c.isprintable() else " " for c in text)
