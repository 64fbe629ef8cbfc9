"""Images of requests: what is read of them, and which addresses are opened."""

from __future__ import annotations

import base64
import datetime
import http.server
import io
import socket
import ssl
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tpuport.cli.server import uploads
from tpuport.cli.server.messages import Refused
from tpuport.cli.server.uploads import fetched, image_of, kept_image, public_addresses


def picture(kind: str = "png", size: tuple[int, int] = (32, 16)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "olive").save(file, kind)
    return file.getvalue()


def bomb(side: int) -> bytes:
    """A small PNG that claims to be large."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        whole = kind + data
        return (
            struct.pack(">I", len(data)) + whole + struct.pack(">I", zlib.crc32(whole))
        )

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 64))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


@pytest.mark.parametrize("kind", ["png", "jpeg", "webp"])
def test_an_image_is_kept_as_it_came(kind: str, tmp_path: Path) -> None:
    data = picture(kind)
    assert kept_image(data, tmp_path / "job").read_bytes() == data


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is no PNG"),
        (b"<svg/>", "is no PNG"),
        (picture()[:60], "is no PNG"),
        (picture("gif"), "is no PNG"),
        (picture(size=(8, 64)), "fewer than"),
        (bomb(5000), "pixels"),
        (bomb(60000), ""),
    ],
)
def test_what_is_no_image_is_refused(data: bytes, said: str, tmp_path: Path) -> None:
    with pytest.raises(Refused) as caught:
        kept_image(data, tmp_path / "job")
    assert said in caught.value.message
    assert caught.value.param == "input_reference"
    assert not (tmp_path / "job").exists()


def test_data_is_read_and_addresses_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    text = base64.b64encode(picture()).decode()
    assert image_of(f"data:image/png;base64,{text}", urls=False) == picture()

    def opened(*args: Any, **more: Any) -> Any:
        raise AssertionError("an address was looked up")

    monkeypatch.setattr(socket, "getaddrinfo", opened)
    for address in (
        *("https://example.com/x.png", "file:///etc/passwd", "/etc/passwd", "", 3),
        *("data:image/png;base64,!", "data:text/html;base64,eA=="),
    ):
        with pytest.raises(Refused):
            image_of(address, urls=False)


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "10.0.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1"),
        *("::1", "fe80::1", "fd00::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1"),
        *("224.0.0.1", "2002:7f00:1::"),
    ],
)
def test_addresses_that_are_not_public_are_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two addresses of a name is enough."""

    def found(host: str, port: int, **more: Any) -> Any:
        return [(2, 1, 6, "", (one, port)) for one in ("93.184.216.34", address)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(Refused, match="is not public"):
        public_addresses("example.com", 443)


@pytest.mark.parametrize(
    "address",
    ["http://example.com/x", "https://u:p@example.com", "https://", "ftp://x"],
)
def test_only_https_is_opened(address: str) -> None:
    with pytest.raises(Refused, match="no https"):
        fetched(address)


class _Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(302 if self.path == "/moved" else 200)
        if self.path == "/moved":
            self.send_header("Location", "https://example.com/image")
        self.end_headers()
        if self.path == "/image":
            self.wfile.write(picture())
        elif self.path == "/large":
            self.wfile.write(b"x" * 3000)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A site of https on this machine: its port, and who trusts it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "example.com")])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name)
    builder = builder.public_key(key.public_key()).serial_number(1)
    builder = builder.not_valid_before(now - datetime.timedelta(1))
    builder = builder.not_valid_after(now + datetime.timedelta(1))
    names = x509.SubjectAlternativeName([x509.DNSName("example.com")])
    made = builder.add_extension(names, False).sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    file = tmp_path_factory.mktemp("site") / "site.pem"
    how = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(key.private_bytes(pem, *how) + made.public_bytes(pem))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Site)
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(file)
    server.socket = own.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port, ssl.create_default_context(cafile=str(file))
    server.shutdown()


def test_an_address_is_read_once_and_not_beyond_its_limits(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, trusts = site
    at = f"https://example.com:{port}"
    monkeypatch.setattr(uploads, "public_addresses", lambda host, port: ["127.0.0.1"])
    assert fetched(f"{at}/image", trusts) == picture()
    monkeypatch.setattr(uploads, "MOST_BYTES", 2000)
    for path, said in (("/large", "more than 2000"), ("/moved", "answers 302")):
        with pytest.raises(Refused, match=said):
            fetched(at + path, trusts)
    with pytest.raises(Refused, match="cannot be read"):
        fetched(f"{at}/image")  # nobody vouches for the site
    monkeypatch.setattr(uploads, "_SECONDS", 0.0)
    with pytest.raises(Refused):
        fetched(f"{at}/image", trusts)


def test_the_addresses_of_a_host_are_tried_in_order(
    site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As text, that of IPv6 is the least; this machine may have no way to it."""
    port, trusts = site
    answers = ["2606:4700::1111", "93.184.216.34", "1.1.1.1"]
    tried: list[tuple[str, float]] = []
    connect = socket.create_connection

    def resolved(host: str, *more: Any, **named: Any) -> Any:
        found = [host] if host == "127.0.0.1" else [*answers, *answers]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (o, port)) for o in found]

    def connected(address: tuple[str, int], timeout: float) -> socket.socket:
        tried.append((address[0], timeout))
        if address[0] != "93.184.216.34":
            raise OSError(101, "Network is unreachable")
        return connect(("127.0.0.1", port), timeout)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    monkeypatch.setattr(socket, "create_connection", connected)
    assert fetched(f"https://example.com:{port}/image", trusts) == picture()
    assert tried == [(answers[0], 5.0), (answers[1], 5.0)]
    tried.clear()
    answers.remove("93.184.216.34")
    with pytest.raises(Refused, match="unreachable"):
        fetched(f"https://example.com:{port}/image", trusts)
    assert [address for address, _ in tried] == answers
