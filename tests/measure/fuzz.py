"""Requests that are broken in many ways, sent by many clients at once.

A client is a coroutine with a connection of its own. What a server may answer is known
of each: an answer that is no HTTP, that shows the inside of the server or blames the
server, or that does not come, is a fault.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from PIL import Image

#: Seconds after the last byte of a request in which an answer, or the end of the
#: connection, must come. The server waits for 20 seconds for the next part of a body.
PATIENCE = 60.0
_FIELDS = (
    *("prompt", "model", "size", "seconds", "num_frames", "fps", "seed", "n"),
    *("num_inference_steps", "guidance_scale", "negative_prompt", "flow_shift"),
    *("lora", "extra", "input_reference", "image", "num_inference_stepz", "", "\ud800"),
    *("extra[eta]", "extra[", "lora[]", "input_reference[image_url]"),
)
_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 9, 2**63, 10**40, 0.5, -0.0, 1e308, "", "x", "96x64"),
    *("0x0", "9" * 4000, "\0", "\ud800", "\u202e", "../../etc/passwd", "NaN"),
    *("https://127.0.0.1/x", [], ["x"], [[[]]], {}, {"a": {"b": []}}),
    *({"image_url": "data:image/png;base64,AA"}, {"image_url": "file:///etc/passwd"}),
    *({"scheduler": "/etc/passwd"}, {"eta": "x"}, {"eta": [1] * 999}, {"timesteps": 1}),
)
#: One of these is in every request, and no video is made of any. Some are found by
#: name, some by their value, and the last ones by the process that checks.
_STOPS: tuple[dict[str, Any], ...] = (
    *({"num_inference_stepz": 1}, {"num_inference_steps": 10**6}, {"size": "8x8"}),
    *({"num_frames": 7}, {"model": "other"}, {"n": 9}, {"lora": "none"}),
    *({"extra": {"no_such_option": 3}}, {"extra": {"guidance_scale_2": "x"}}),
)
#: ``{id}`` is a video that is done.
_PATHS = (
    *("/v1/videos", "/v1/videos/", "/v1/videos/video_x", "/v1/videos/%2e%2e%2f", "/"),
    *("/v1/videos/video_x/content?variant=video", "/v1/models", "/v1/models/%00", "/x"),
    *("/v1/videos?limit=-1", "/v1/videos?limit=9e9", "/v1/videos?after=%ff", "/health"),
    *("/ready", "/metrics", "/v1/videos?order=up", "//", "/v1/videos/../../etc/passwd"),
    *("/page.js", "/page/../api.py", "/v1/videos?after={id}", "/v1/videos/{id}"),
    *("/v1/videos/{id}/content?variant=thumbnail", "/v1/videos/{id}/content?index=7"),
    *("/v1/videos/{id}/content?variant=../x", "/v1/videos/{id}/content?index=-1"),
    *("/v1/videos/{id}/content?variant=sidecar", "/" + "x" * 9000),
)
_RANGES = (
    *("bytes=0-", "bytes=-1", "bytes=5-2", "x=1", "bytes=", "bytes=99999999999-"),
    *("bytes=0-0,2-2,4-4", "bytes=" + ",".join(["0-1"] * 900), "bytes=--1", "bytes=a-"),
)
_TYPES = (
    *("text/plain", "multipart/form-data", "", "a/b;c=\xff", "application/json;"),
    *("multipart/form-data; boundary=", "application/json; charset=utf-16"),
    *(
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=a; charset=x",
    ),
)
_METHODS = ("GET", "GET", "GET", "PUT", "HEAD", "PATCH", "OPTIONS", "X", "get", "TRACE")


@dataclass(frozen=True)
class Message:
    """What a client sends, and how.

    Attributes:
        parts: of the bytes.
        pause: seconds between two parts.
        then: ``reads`` the answer; ``half`` says first that nothing more comes;
            ``leaves`` breaks the connection; ``sips`` reads a little, and breaks it.
        ends: what was sent is no whole request, so that no answer need come.
        head: the answer has no body.
    """

    kind: str
    parts: tuple[bytes, ...]
    pause: float = 0.0
    then: str = "reads"
    ends: bool = False
    head: bool = False


@dataclass
class Found:
    """What came of it.

    Attributes:
        answers: how often each kind of message got each code.
        faults: what no server may do, in words.
        most: connections that were open at once.
        slowest: seconds from the last byte of a whole request to the end of the answer.
    """

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    open: int = 0
    most: int = 0
    slowest: float = 0.0

    @property
    def codes(self) -> Counter[str]:
        """How often each code came."""
        found: Counter[str] = Counter()
        for (_, code), count in self.answers.items():
            found[code] += count
        return found

    @property
    def kinds(self) -> dict[str, dict[str, int]]:
        """The codes of each kind."""
        found: dict[str, dict[str, int]] = {}
        for (kind, code), count in sorted(self.answers.items()):
            found.setdefault(kind, {})[code] = count
        return found


def _head(method: str, path: str, *lines: str, close: bool = True) -> bytes:
    own = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1"]
    own += ["Connection: close"] if close else []
    return "\r\n".join([*own, *lines, "", ""]).encode("latin-1", "replace")


def _post(body: bytes, kind: str, *lines: str, length: int | None = None) -> bytes:
    about = f"Content-Length: {len(body) if length is None else length}"
    return _head("POST", "/v1/videos", f"Content-Type: {kind}", about, *lines) + body


def _given(chance: random.Random) -> dict[str, Any]:
    given: dict[str, Any] = {"prompt": "x"} if chance.random() < 0.8 else {}
    for _ in range(chance.randrange(4)):
        given[chance.choice(_FIELDS)] = chance.choice(_VALUES)
    return {**given, **chance.choice(_STOPS)}


def _json(chance: random.Random) -> bytes:
    text = json.dumps(_given(chance), ensure_ascii=chance.random() < 0.5)
    return text.encode("utf-8", "surrogatepass")


def _broken(chance: random.Random, data: bytes) -> bytes:
    """What a broken client makes of the data."""
    kind = chance.randrange(4)
    if kind == 0:
        return data[: chance.randrange(len(data))]
    if kind == 1:
        changed = bytearray(data)
        for _ in range(chance.randrange(1, 9)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)
    if kind == 2:
        return chance.randbytes(chance.randrange(300))
    return b"[" * chance.choice((1, 500, 100_000))


def _form(
    chance: random.Random, edge: str = "edge", image: bytes | None = None
) -> bytes:
    parts = []
    for name, value in _given(chance).items():
        shown = name.encode("utf-8", "replace").decode()
        text = value if isinstance(value, str) else json.dumps(value)
        file = '; filename="x.png"' if chance.random() < 0.05 else ""
        head = f'--{edge}\r\nContent-Disposition: form-data; name="{shown}"{file}'
        parts.append(f"{head}\r\n\r\n".encode() + text.encode("utf-8", "replace"))
    if image is not None:
        head = f'--{edge}\r\nContent-Disposition: form-data; name="input_reference"; '
        parts.append(f'{head}filename="x.png"\r\n\r\n'.encode() + image)
    return b"".join(part + b"\r\n" for part in parts) + f"--{edge}--\r\n".encode()


def _png(side: int) -> bytes:
    """A small file that claims to be a large picture."""
    file = b"\x89PNG\r\n\x1a\n"
    about = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    for kind, data in (
        (b"IHDR", about),
        (b"IDAT", zlib.compress(b"\0" * 64)),
        (b"IEND", b""),
    ):
        check = struct.pack(">I", zlib.crc32(kind + data))
        file += struct.pack(">I", len(data)) + kind + data + check
    return file


def _picture(chance: random.Random) -> bytes:
    file = io.BytesIO()
    size = chance.choice(((16, 16), (1, 1), (96, 64), (3000, 20)))
    kind = chance.choice(("png", "jpeg", "webp", "gif", "bmp"))
    Image.new("RGB", size, "olive").save(file, kind)
    whole = file.getvalue()
    cut = whole[: chance.randrange(len(whole))]
    return chance.choice((whole, cut, _png(60_000), _png(4000), b"<svg/>", b"", whole))


def _of_json(chance: random.Random) -> Message:
    key = f"Idempotency-Key: {chance.choice(('k', 'k' * 999, '', chr(233)))}"
    lines = [key] if chance.random() < 0.3 else []
    return Message("json", (_post(_json(chance), "application/json", *lines),))


def _of_broken_json(chance: random.Random) -> Message:
    body = _broken(chance, _json(chance))
    return Message("json, broken", (_post(body, "application/json"),))


def _of_form(chance: random.Random) -> Message:
    edges = ("edge",) * 9 + ("", "a b", '"', "x" * 99)
    edge = chance.choice(edges)
    kind = f"multipart/form-data; boundary={edge}"
    return Message("form", (_post(_form(chance, edge), kind),))


def _of_broken_form(chance: random.Random) -> Message:
    body = _broken(chance, _form(chance))
    return Message("form, broken", (_post(body, "multipart/form-data; boundary=edge"),))


def _of_image(chance: random.Random) -> Message:
    body = _form(chance, image=_picture(chance))
    return Message("form, image", (_post(body, "multipart/form-data; boundary=edge"),))


def _of_cut(chance: random.Random) -> Message:
    """A body that ends before its announced end; the client waits, or says so."""
    body, kind = _json(chance), "application/json"
    if chance.random() < 0.7:
        body, kind = _form(chance), "multipart/form-data; boundary=edge"
    length = len(body) + chance.choice((1, 1000, 1 << 20, 1 << 40))
    body = body[: chance.randrange(len(body) + 1)]
    then = chance.choice(("half", "half", "half", "half", "leaves", "leaves", "reads"))
    return Message("cut", (_post(body, kind, length=length),), then=then, ends=True)


def _of_encoding(chance: random.Random) -> Message:
    text = json.dumps(_given(chance), ensure_ascii=False)
    codec = chance.choice(("utf-16", "utf-32", "utf-8-sig", "latin-1", "utf-7"))
    body, kind = text.encode(codec, "replace"), "application/json"
    lines = []
    if chance.random() < 0.3:
        body, lines = zlib.compress(body), ["Content-Encoding: deflate"]
    if chance.random() < 0.5:
        kind = chance.choice(_TYPES)
    return Message("encoding", (_post(body, kind, *lines),))


def _of_chunks(chance: random.Random) -> Message:
    body = _json(chance)
    pieces = [body[n : n + 20] for n in range(0, len(body), 20)]
    chunks = [f"{len(one):x}\r\n".encode() + one + b"\r\n" for one in pieces]
    last = chance.choice((b"0\r\n\r\n",) * 4 + (b"zz\r\n", b"-5\r\nx", b"f" * 40))
    lines = ["Content-Type: application/json", "Transfer-Encoding: chunked"]
    if chance.random() < 0.2:
        lines.append("Content-Length: 3")
    if chance.random() < 0.2:
        lines.append("Expect: 100-continue")
    whole = last == b"0\r\n\r\n"
    data = _head("POST", "/v1/videos", *lines) + b"".join(chunks) + last
    return Message("chunks", (data,), then="reads" if whole else "half", ends=not whole)


def _of_path(chance: random.Random) -> Message:
    method = chance.choice(_METHODS)
    data = _head(method, chance.choice(_PATHS))
    return Message("path", (data,), head=method.upper() == "HEAD")


def _of_range(chance: random.Random) -> Message:
    line = f"Range: {chance.choice(_RANGES)}"
    return Message("range", (_head("GET", "/v1/videos/{id}/content", line),))


def _of_line(chance: random.Random) -> Message:
    """Heads that are none, or nearly."""
    data = chance.choice(
        (
            chance.randbytes(chance.randrange(1, 400)) + b"\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET / HTTP/1.0\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
            _head("GET", "/", "X: " + "x" * 100_000),
            _head("GET", "/", *(f"X{n}: x" for n in range(2000))),
            _head("GET", "/health", "Bad Header: x"),
            _head("GET", "/health", "Upgrade: websocket", close=False),
            _head("POST", "/v1/videos", "Content-Length: -3"),
            _head("POST", "/v1/videos", "Content-Length: 9, 3"),
            _head("POST", "/v1/videos", "Content-Length: " + "9" * 5000),
            b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + chance.randbytes(200),
        )
    )
    return Message("head", (data,), then="half", ends=True)


def _of_slow(chance: random.Random) -> Message:
    """Small parts, with pauses; some clients stop before the end."""
    body = _json(chance)
    data = _post(body, "application/json")
    each = len(data) // 8 + 1
    parts = tuple(data[n : n + each] for n in range(0, len(data), each))
    if chance.random() < 0.1:
        stop = chance.randrange(1, len(parts))
        return Message("stalled", parts[:stop], pause=0.1, ends=True)
    return Message("slow", parts, pause=chance.choice((0.05, 0.2)))


def _of_several(chance: random.Random) -> Message:
    """Three requests on one connection, of which the second has a body nobody reads."""
    body = _json(chance)
    about = f"Content-Length: {len(body)}"
    data = _head("GET", "/health", close=False)
    data += _head("POST", "/x", about, close=False) + body
    data += _head("GET", chance.choice(("/health", "/v1/models")))
    return Message("several", (data,))


def _of_leaving(chance: random.Random) -> Message:
    data = chance.choice((_post(_json(chance), "application/json"), _head("GET", "/")))
    then = chance.choice(("leaves", "sips"))
    if chance.random() < 0.5:
        data = _head("GET", "/v1/videos/{id}/content")
    return Message("leaves", (data,), then=then, ends=True)


def _of_job(chance: random.Random) -> Message:
    """A request of which a video is made; the client then deletes the job."""
    prompt = chance.choice(("a fox", "\u202e" * 30, "x" * 20_000, "\U0001f98a"))
    given = {"prompt": prompt, "num_inference_steps": 1, "seed": chance.randrange(99)}
    return Message("job", (_post(json.dumps(given).encode(), "application/json"),))


#: Each with its weight.
_KINDS: tuple[tuple[Callable[[random.Random], Message], int], ...] = (
    *((_of_json, 20), (_of_broken_json, 8), (_of_form, 14), (_of_broken_form, 10)),
    *((_of_image, 6), (_of_cut, 6), (_of_encoding, 6), (_of_chunks, 4), (_of_path, 9)),
    *(
        (_of_line, 4),
        (_of_slow, 4),
        (_of_several, 2),
        (_of_leaving, 3),
        (_of_job, 1),
        (_of_range, 3),
    ),
)


def message(chance: random.Random) -> Message:
    """A request of a broken client."""
    makers, weights = zip(*_KINDS, strict=True)
    made: Message = chance.choices(makers, weights)[0](chance)
    return made


class _Bytes:
    """What has been read, as a socket for :class:`http.client.HTTPResponse`."""

    def __init__(self, data: bytes) -> None:
        self.file = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]

    def makefile(self, *args: Any) -> Any:
        own = self.file

        class Kept:  # an answer closes its file
            def __getattr__(self, name: str) -> Any:
                return getattr(own, name)

            def close(self) -> None:
                pass

        return Kept()


def answers_of(data: bytes, head: bool) -> Iterator[tuple[int, bytes]]:
    """The codes and the bodies of what a server has sent.

    Raises:
        ValueError: it is no HTTP.
    """
    source = _Bytes(data)
    while source.file.peek(1):
        answer = http.client.HTTPResponse(source, method="HEAD" if head else "GET")  # type: ignore[arg-type]
        try:
            answer.begin()
            yield answer.status, answer.read()
        except http.client.HTTPException as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


def _fault(code: int, body: bytes) -> str:
    """What is wrong with an answer; empty for nothing."""
    if b"Traceback" in body or b'File "' in body:
        return f"{code} shows the inside: {body[:300]!r}"
    if code >= 500:
        return f"{code}: {body[:300]!r}"
    # Uvicorn answers this by itself, before a head is one.
    if code < 400 or body in (b"", b"Invalid HTTP request received."):
        return ""
    try:
        said = json.loads(body)["error"]["message"]
        return "" if said and "\n" not in said else f"{code} says {said[:300]!r}"
    except (ValueError, LookupError, TypeError):
        return f"{code} is no error that clients read: {body[:300]!r}"


async def _sent(
    port: int, message: Message, video: str, found: Found
) -> list[tuple[int, bytes]]:
    """Send a message, and note what comes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found.open += 1
    found.most = max(found.most, found.open)
    data = b""
    try:
        for number, part in enumerate(message.parts):
            if number:
                await asyncio.sleep(message.pause)
            writer.write(part.replace(b"{id}", video.encode()))
            await writer.drain()
        if message.then == "half":
            writer.write_eof()
        began = time.monotonic()
        if message.then in ("leaves", "sips"):
            if message.then == "sips":
                await asyncio.wait_for(reader.read(10), PATIENCE)
            found.answers[message.kind, "left"] += 1
            return []
        try:
            async with asyncio.timeout(PATIENCE):
                while part := await reader.read(1 << 16):
                    data += part
        except TimeoutError:
            found.faults.append(f"{message.kind}: no end after {PATIENCE:.0f} s")
        if not message.ends:
            found.slowest = max(found.slowest, time.monotonic() - began)
    except OSError:  # the server ends a connection before all is sent
        with suppress(OSError):
            data += await reader.read()
    finally:
        writer.transport.abort()
        found.open -= 1
    return _noted(message, data, found)


def _noted(message: Message, data: bytes, found: Found) -> list[tuple[int, bytes]]:
    try:
        answers = list(answers_of(data, message.head))
    except ValueError as error:
        found.faults.append(f"{message.kind}: {error}: {data[:300]!r}")
        return []
    answers = [one for one in answers if one[0] != 100]
    for code, body in answers:
        found.answers[message.kind, str(code)] += 1
        if fault := _fault(code, body):
            found.faults.append(f"{message.kind}: {fault}")
    if not answers:
        found.answers[message.kind, "closed"] += 1
        if not message.ends:
            found.faults.append(f"{message.kind}: no answer to {message.parts!r:.300}")
    return answers


async def _delete(port: int, made: bytes, video: str, found: Found) -> None:
    name = json.loads(made)["id"]
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", ""), ("GET", "")):
        data = _head(method, f"/v1/videos/{name}{path}")
        await _sent(port, Message(f"job, {method}{path}", (data,)), video, found)


def fuzz(port: int, count: int, seed: int, *, at_once: int, video: str) -> Found:
    """Send ``count`` messages from ``at_once`` clients.

    Args:
        video: a job that is done.
    """
    chance, found = random.Random(seed), Found()
    left = (message(chance) for _ in range(count))

    async def client() -> None:
        for one in left:
            for code, body in await _sent(port, one, video, found):
                if one.kind == "job" and code == 200:
                    await _delete(port, body, video, found)

    async def all_clients() -> None:
        await asyncio.gather(*(client() for _ in range(at_once)))

    asyncio.run(all_clients())
    return found
