"""A server under a fuzzer, and the price of its answers for a video that is made.

``python -m tests.measure.serve`` starts a server of the demo, sends requests that are
broken in many ways, and tells of answers, memory and tracebacks. Then it makes pairs of
videos, one of each with requests at a steady rate, and compares their steps. With
``--videos`` many follow, one after the other; jobs are kept for a minute.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.cli.server.running import Running, running

#: Seconds that a broken client waits for an answer.
_PATIENCE = 30.0
_FIELDS = (
    *("prompt", "model", "size", "seconds", "num_frames", "fps", "seed", "n"),
    *("num_inference_steps", "guidance_scale", "negative_prompt", "flow_shift"),
    *("lora", "extra", "input_reference", "image", "num_inference_stepz", "", "\ud800"),
)
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        0,
        -1,
        1,
        9,
        2**63,
        10**40,
        0.5,
        -0.0,
        1e308,
        "",
        "x",
        "96x64",
        "0x0",
    ),
    *("9" * 4000, "\0", "\ud800", "\u202e", "../../etc/passwd", "https://127.0.0.1/x"),
    *(
        [],
        ["x"],
        [[[]]],
        {},
        {"a": {"b": []}},
        {"image_url": "data:image/png;base64,AA"},
    ),
    *({"image_url": "file:///etc/passwd"}, {"scheduler": "/etc/passwd"}, "NaN"),
)
_PATHS = (
    *("/v1/videos", "/v1/videos/", "/v1/videos/video_x", "/v1/videos/%2e%2e%2f", "/"),
    *("/v1/videos/video_x/content?variant=video", "/v1/models", "/v1/models/%00", "/x"),
    *("/v1/videos?limit=-1", "/v1/videos?limit=9e9", "/v1/videos?after=%ff", "/health"),
    *("/ready", "/metrics", "/v1/videos?order=up", "//", "/v1/videos/../../etc/passwd"),
)


def _head(method: str, path: str, **headers: str) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: 127.0.0.1", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def _json_body(chance: random.Random) -> bytes:
    given = {"prompt": "x"} if chance.random() < 0.8 else {}
    for _ in range(chance.randrange(4)):
        given[chance.choice(_FIELDS)] = chance.choice(_VALUES)
    given.setdefault("num_inference_stepz", 1)  # no video is made of these
    body = json.dumps(given, ensure_ascii=chance.random() < 0.5)
    data = body.encode("utf-8", "surrogatepass")
    return _broken(chance, data)


def _broken(chance: random.Random, data: bytes) -> bytes:
    """The data, or what a broken client makes of them."""
    kind = chance.randrange(8)
    if kind == 0:
        return data[: chance.randrange(len(data) + 1)]
    if kind == 1:
        changed = bytearray(data or b"x")
        for _ in range(chance.randrange(1, 9)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        return bytes(changed)
    if kind == 2:
        return chance.randbytes(chance.randrange(300))
    if kind == 3:
        return b"[" * chance.choice((1, 500, 100_000))
    return data


def _form(chance: random.Random) -> tuple[bytes, str]:
    edge = (
        "edge" if chance.random() < 0.9 else chance.choice(("", "a b", '"', "x" * 99))
    )
    parts = []
    for _ in range(chance.randrange(5)):
        name = chance.choice(_FIELDS).encode("utf-8", "replace").decode()
        value = str(chance.choice(_VALUES)).encode("utf-8", "replace")
        file = '; filename="x.png"' if chance.random() < 0.3 else ""
        head = (
            f'--{edge}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n\r\n'
        )
        parts.append(head.encode() + value + b"\r\n")
    # No video is made of these.
    head = f'--{edge}\r\nContent-Disposition: form-data; name="stepz"\r\n\r\n1\r\n'
    parts.append(head.encode())
    body = b"".join(parts) + f"--{edge}--\r\n".encode()
    return _broken(chance, body), f"multipart/form-data; boundary={edge}"


def message(chance: random.Random) -> tuple[bytes, float, bool]:
    """A request, the seconds that its client lets pass in the middle, and whether the
    client goes away before it has sent what it announced.
    """
    kind = chance.randrange(10)
    if kind < 4:
        body, content = _json_body(chance), "application/json"
    elif kind < 8:
        body, content = _form(chance)
    else:
        method = chance.choice(
            ("GET", "PUT", "HEAD", "PATCH", "DELETE", "OPTIONS", "X")
        )
        path = chance.choice(_PATHS)
        if kind == 9:
            return chance.randbytes(chance.randrange(1, 400)) + b"\r\n\r\n", 0.0, True
        return _head(method, path), 0.0, False
    if chance.random() < 0.1:
        content = chance.choice(("text/plain", "multipart/form-data", "", "a/b;c=\xff"))
    length = len(body)
    if chance.random() < 0.1:  # a body that ends early, or never comes
        length += chance.choice((-1, 1, 1000, 1 << 40))
    head = _head(
        "POST",
        "/v1/videos",
        Content_Type=content,
        Content_Length=str(max(length, 0)),
    )
    slow = chance.choice((0.0,) * 40 + (0.5,))
    return head + body, slow, length > len(body)


def _send(port: int, data: bytes, slow: float, short: bool) -> tuple[str, bytes]:
    """The code of the answer, or why there is none, and its bytes."""
    found = b""
    try:
        with socket.create_connection(("127.0.0.1", port), _PATIENCE) as client:
            half = len(data) // 2 if slow else len(data)
            client.sendall(data[:half])
            if slow:
                time.sleep(slow)
                client.sendall(data[half:])
            if short:
                client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                found += part
    except OSError as error:
        return found[9:12].decode("latin-1") or type(error).__name__, found
    return found[9:12].decode("latin-1") or "closed", found


def fuzz(port: int, count: int, seed: int, at_once: int = 50) -> Counter[str]:
    """How often each answer came.

    Raises:
        AssertionError: a client was shown a traceback.
    """
    chance = random.Random(seed)
    asked = [message(chance) for _ in range(count)]
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda one: _send(port, *one), asked))
    for _, body in answers:
        assert b"Traceback" not in body, body[:2000]
        assert b'File "' not in body, body[:2000]
    return Counter(code for code, _ in answers)


def resident(pid: int) -> int:
    """MiB of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def _ask_steadily(port: int, rate: int, name: str, over: threading.Event) -> list[int]:
    """Ask for a job, for the list and for figures; tells answers and failures."""
    counts = [0, 0]
    paths = (f"/v1/videos/{name}", "/v1/videos?limit=5", "/health", "/metrics")

    def client(number: int, each: float) -> None:
        import http.client

        own = http.client.HTTPConnection("127.0.0.1", port, timeout=_PATIENCE)
        due = time.monotonic()
        while not over.is_set():
            own.request("GET", paths[number % len(paths)])
            answer = own.getresponse()
            answer.read()
            counts[answer.status != 200] += 1
            due += each
            time.sleep(max(due - time.monotonic(), 0))

    clients = 4
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        for done in [pool.submit(client, n, clients / rate) for n in range(clients)]:
            done.result()
    return counts


def steps_of(server: Running, steps: int, rate: int) -> tuple[float, float]:
    """Seconds of a step of one video, and answers a second meanwhile."""
    name = server.create(prompt="a fox", num_inference_steps=steps)
    over, found = threading.Event(), []
    began = time.monotonic()

    def ask() -> None:
        found.append(_ask_steadily(server.port, rate, name, over))

    thread = threading.Thread(target=ask)
    if rate:
        thread.start()
    while server.job(name)["status"] not in ("completed", "failed"):
        time.sleep(0.5)
    over.set()
    if rate:
        thread.join()
        assert found[0][1] == 0, "a request failed"
    passed = time.monotonic() - began
    stages = server.job(name)["tpuport"]["stages"]
    server.ask(f"/v1/videos/{name}", method="DELETE")
    return stages["denoise"] / steps, (found[0][0] / passed if rate else 0.0)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(one) for one in found.split()]


def many(server: Running, count: int) -> None:
    """Make videos, one after the other; tell of memory and of files that are left."""
    pid, part = server.process.pid, max(count // 10, 1)
    for number in range(count):
        name = server.create(prompt=f"fox {number}", num_inference_steps=1)
        assert server.done(name)["status"] == "completed"
        if (number + 1) % part == 0:
            held = [resident(one) for one in (pid, *children(pid))]
            places = len(list((server.log.parent / "kept/jobs").glob("*")))
            text = f"{number + 1} videos, MiB of each process {held}, {places} folders"
            print(text, flush=True)


def main() -> None:
    """Print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--rate", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--videos", type=int, default=0)
    asked = parser.parse_args()
    flags = ("--size", "96x64", "--frames", "9", "--folder", "kept", "--keep", "60s")
    with tempfile.TemporaryDirectory() as place:
        own = {"TPUPORT_CACHE_DIR": f"{place}/cache"}
        with running(Path(place), *flags, environment=own) as server:
            server.ready()
            pid, part = server.process.pid, max(asked.count // 10, 1)
            for number in range(10):
                at_once = 200 if number % 2 else 50
                codes = fuzz(server.port, part, asked.seed + number, at_once)
                print(part, "requests,", resident(pid), "MiB:", dict(codes), flush=True)
            assert server.ask("/health")[0] == 200
            print("tracebacks in the log:", server.said.count("Traceback"))
            print("errors in the log:", server.said.count("error:"))
            ratios = []
            for number in range(asked.pairs):
                rates = (0, asked.rate) if number % 2 else (asked.rate, 0)
                took = {rate: steps_of(server, asked.steps, rate) for rate in rates}
                ratios.append(took[asked.rate][0] / took[0][0])
                print(
                    f"a step: {took[0][0]:.4f} s alone, {took[asked.rate][0]:.4f} s "
                    f"with {took[asked.rate][1]:.0f} answers a second",
                    flush=True,
                )
            many(server, asked.videos)
            if ratios:
                print(f"median ratio {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main()
