"""Who may ask, and how much."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest

from tpuport.cli.server import guard
from tpuport.cli.server.guard import Guard, is_loopback, read_keys
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

    made = Guard(reads_all, keys=keys, local=local, metrics=Metrics())
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


def test_hosts_of_this_machine() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "x.example", "")))
