"""Who may ask, and how much."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from tpuport.cli.server import guard
from tpuport.cli.server.api import application
from tpuport.cli.server.guard import Guard, PatientProtocol, is_loopback, read_keys
from tpuport.cli.server.metrics import Metrics
from tpuport.errors import UsageError


async def reads_all(scope: Any, receive: Any, send: Any) -> None:
    """An application that reads the body, and tells whose request it is."""
    size, more = 0, True
    while more:
        message = await receive()
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
    if scope["path"] == "/broken":
        raise RuntimeError("a secret")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    body = json.dumps([scope["owner"], size]).encode()
    await send({"type": "http.response.body", "body": body})


def ask(
    path: str = "/v1/videos",
    *,
    parts: tuple[bytes, ...] = (b"",),
    keys: tuple[str, ...] = (),
    local: bool = True,
    names: tuple[str, ...] = (),
    method: str = "POST",
    slow: float = 0.0,
    **headers: str,
) -> tuple[int, Any]:
    """The code and the document of an answer."""
    headers = {"host": "127.0.0.1:8000", **headers}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": [(k.encode(), v.encode()) for k, v in headers.items()],
    }
    told: list[MutableMapping[str, Any]] = []
    left: Iterator[tuple[int, bytes]] = enumerate(parts, 1)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(slow)
        number, body = next(left)
        more = number < len(parts)
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(message: MutableMapping[str, Any]) -> None:
        told.append(message)

    made = Guard(reads_all, keys=keys, local=local, metrics=Metrics(), names=names)
    asyncio.run(made(scope, receive, send))
    assert made._held == 0
    assert (b"x-content-type-options", b"nosniff") in told[0]["headers"]
    return told[0]["status"], json.loads(told[1]["body"])


def test_a_key_is_needed_below_v1_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the team\nfirst-key\n\nsecond-key\n")
    keys = read_keys(file)
    owners = set()
    for key in ("first-key", "second-key"):
        code, (owner, _) = ask(keys=keys, authorization=f"Bearer {key}")
        assert code == 200
        owners.add(owner)
    assert len(owners) == 2
    assert not any("key" in owner for owner in owners)
    for wrong in (
        {},
        {"authorization": "Bearer first"},
        {"authorization": "first-key"},
    ):
        assert ask(keys=keys, **wrong)[0] == 401
    assert ask("/health", keys=keys)[0] == 200
    assert ask("/v1/videos/../x", keys=keys)[0] == 401


@pytest.mark.parametrize("text", ["", "# none\n", "short\n", "with a space\n"])
def test_a_file_without_keys_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(text)
    with pytest.raises(UsageError, match="key"):
        read_keys(file)


def test_pages_of_other_sites_do_not_reach_a_local_server() -> None:
    assert ask(host="localhost:8000", origin="http://localhost:8000")[0] == 200
    assert ask(host="[::1]:8000")[0] == 200
    assert ask(host="evil.example:8000")[0] == 403
    assert ask(host="evil.example", local=False)[0] == 200
    assert ask(origin="https://evil.example")[0] == 403
    assert ask(origin="null")[0] == 403


def test_a_proxy_on_this_machine_gives_the_server_a_name() -> None:
    """It passes its own name on, or one of this machine."""
    for host in ("videos.example", "127.0.0.1:8000"):
        more = {"host": host, "origin": "https://videos.example"}
        assert ask(**more, names=("Videos.Example",))[0] == 200
        assert ask(**more)[0] == 403
    assert ask(host="evil.example", names=("videos.example",))[0] == 403
    assert ask(origin="https://evil.example", names=("videos.example",))[0] == 403


def test_bodies_are_limited_in_size_and_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MOST_BODY", 100)
    assert ask(parts=(b"x" * 50, b"x" * 50)) == (200, ["", 100])
    assert ask(parts=(b"x" * 50, b"x" * 51))[0] == 413
    assert ask(**{"content-length": "101"})[0] == 413
    monkeypatch.setattr(guard, "MOST_BODIES", 60)
    assert ask(parts=(b"x" * 50, b"x" * 50))[0] == 503
    monkeypatch.setattr(guard, "_PART", 0.01)
    assert ask(slow=5.0)[0] == 408


def test_what_fails_says_nothing_of_the_inside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, document = ask("/broken")
    assert (code, document["error"]["message"]) == (500, "the server has failed")
    assert "a secret" in capsys.readouterr().err


def test_what_fails_behind_a_path_is_an_error_that_clients_read() -> None:
    """Starlette's own answer is text."""
    none: Any = None
    own = httpx.ASGITransport(application(none), raise_app_exceptions=False)

    async def asked() -> httpx.Response:
        async with httpx.AsyncClient(transport=own, base_url="http://a") as client:
            return await client.get("/ready")

    answer = asyncio.run(asked())
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


def test_hosts_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "x.example", "")))


async def _gives_much(scope: Any, receive: Any, send: Any) -> None:
    """Answers without a look at the body: 13 MB in 200 parts or one, or few bytes."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    count = 200 if scope["path"] == "/much" else 1
    size = {"/much": 1 << 16, "/whole": 200 << 16}.get(scope["path"], 9)
    part = {"type": "http.response.body", "body": bytes(size)}
    for left in range(count - 1, -1, -1):
        await send({**part, "more_body": left > 0})


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, Any]]:
    """The port of a server that waits for half a second, and who is connected."""
    monkeypatch.setattr(guard, "_PART", 0.5)
    monkeypatch.setattr(guard, "_TAKEN", 0.5)
    own: dict[str, Any] = {"lifespan": "off", "ws": "none", "log_level": "critical"}
    config = uvicorn.Config(_gives_much, http=PatientProtocol, **own)
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        run = threading.Thread(target=server.run, args=([listening],))
        run.start()
        yield listening.getsockname()[1], server.server_state.connections
        server.should_exit = True
        run.join()


def _stays(
    connections: Any, client: socket.socket, *, reads: int, sends: bytes
) -> bool:
    """Whether a client is connected for 3 s that does little every 0.1 s."""
    until = time.monotonic() + 3
    while time.monotonic() < until and connections:
        time.sleep(0.1)
        with contextlib.suppress(OSError):
            client.sendall(sends)
            client.recv(reads) if reads else None
    return bool(connections)


@pytest.mark.parametrize(
    ("begins", "reads", "sends"),
    [
        (b"", 0, b""),
        (b"", 0, b"G"),  # a head, byte by byte
        (b"GET /few HTTP/1.1\r\nHost: a\r\n\r\n", 0, b"G"),  # and a second head
        (b"POST /few HTTP/1.1\r\nHost: a\r\nContent-Length: 99999\r\n\r\n", 0, b"x"),
        (b"GET /much HTTP/1.1\r\nHost: a\r\n\r\n", 0, b""),
        (b"GET /much HTTP/1.1\r\nHost: a\r\n\r\n", 1, b""),
        (b"GET /whole HTTP/1.1\r\nHost: a\r\n\r\n", 1, b""),
        (b"GET /much HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n", 1, b""),
    ],
)
def test_a_client_that_only_drips_is_let_go(
    connections: tuple[int, Any], begins: bytes, reads: int, sends: bytes
) -> None:
    """A wait of over a second: the server's own are half a second each."""
    port, connected = connections
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.sendall(begins)
        time.sleep(0.2)
        assert not _stays(connected, client, reads=reads, sends=sends)


@pytest.mark.parametrize("path", [b"/much", b"/whole"])
def test_a_client_that_reads_steadily_gets_all(
    connections: tuple[int, Any], path: bytes
) -> None:
    """More slowly than the server gives, and for longer than the server waits."""
    port, _ = connections
    size, began = 0, time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        head = b" HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        client.sendall(b"GET " + path + head)
        while part := client.recv(1 << 17):
            size += len(part)
            time.sleep(0.01)
    assert size > 200 << 16
    assert time.monotonic() - began > 0.5
