"""A job of a server of `tpuport serve`, over the HTTP of docs/serve.md."""

from __future__ import annotations

import json
import os
import secrets
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from typing import Any

#: Seconds that a server may be away, as while it is started again.
PATIENCE = 600.0
#: Seconds for an answer, and between two tries.
_TIMEOUT, _FIRST, _LONGEST = 330.0, 0.5, 15.0
#: Answers of a server that is not up.
_AWAY = (502, 503, 504)


class ServerError(RuntimeError):
    """What the server refuses, or that it cannot be reached."""

    def __init__(self, said: str, *, away: bool = False) -> None:
        super().__init__(said)
        self.away = away


class Server:
    """A server at ``http://HOST:PORT``; the key is of TPUPORT_API_KEY, if any.

    The key is no widget of a node: ComfyUI keeps widgets in every workflow and file.

    Args:
        on_wait: called before each new try while the server is away; may raise.
    """

    def __init__(self, url: str, on_wait: Callable[[], None]) -> None:
        self.url = url.strip().rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ServerError(f"{url!r} is no address; give http://127.0.0.1:8000")
        self._on_wait = on_wait

    def create(self, fields: dict[str, Any], image: bytes | None) -> dict[str, Any]:
        """A new job; ``image`` is a PNG to start from.

        Raises:
            ServerError: the request is refused, or the server cannot be reached.
        """
        if image is None:
            body, kind = json.dumps(fields).encode(), "application/json"
        else:
            body, kind = _form(fields, image)
        found: dict[str, Any] = json.loads(self._ask("videos", body, kind))
        return found

    def job(self, name: str) -> dict[str, Any]:
        """A job as it is now; waits for a server that is away."""
        found: dict[str, Any] = json.loads(self._patiently(f"videos/{name}"))
        return found

    def content(self, name: str, variant: str) -> bytes:
        """A file of a job; waits for a server that is away."""
        return self._patiently(f"videos/{name}/content?variant={variant}")

    def preview(self, name: str) -> bytes | None:
        """The newest preview as a PNG; nothing where there is none."""
        try:
            return self._ask(f"videos/{name}/content?variant=preview")
        except ServerError:
            return None

    def delete(self, name: str) -> None:
        """End a job, and remove what it has made."""
        self._ask(f"videos/{name}", method="DELETE")

    def _patiently(self, path: str) -> bytes:
        began, pause = time.monotonic(), _FIRST
        while True:
            try:
                return self._ask(path)
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
        kind: str = "application/json",
        method: str | None = None,
    ) -> bytes:
        headers = {"Content-Type": kind}
        if key := os.environ.get("TPUPORT_API_KEY", "").strip():
            headers["Authorization"] = f"Bearer {key}"
        url = f"{self.url}/v1/{path}"
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as answer:
                found: bytes = answer.read()
                return found
        except urllib.error.HTTPError as error:
            raise ServerError(_told(error), away=error.code in _AWAY) from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"{self.url} cannot be reached: {reason}",
                away=isinstance(error, OSError),
            ) from None


def _told(error: urllib.error.HTTPError) -> str:
    """The server's own words."""
    try:
        said = str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        said = str(error.reason)
    if error.code == 401:
        said += "; set TPUPORT_API_KEY where ComfyUI is started"
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
