"""The image of a request: bytes of the request itself, or of an address."""

from __future__ import annotations

import base64
import contextlib
import http.client
import io
import ipaddress
import re
import socket
import ssl
import threading
import time
import urllib.parse
from pathlib import Path

from tpuport.cli.server.fields import IMAGE
from tpuport.cli.server.messages import Refused
from tpuport.core.files.atomic import atomic_write_bytes, one_line
from tpuport.core.files.sources import SMALLEST_SIDE

#: Pixels of an image, and its bytes.
MOST_PIXELS, MOST_BYTES = 1 << 24, 16 << 20
#: What is read.
_FORMATS = ("PNG", "JPEG", "WEBP")
#: The endings of the files. A phone's JPEG may hold several pictures: MPO.
_ENDINGS = {"PNG": ".png", "JPEG": ".jpg", "MPO": ".jpg", "WEBP": ".webp"}
#: Stands for addresses of IPv4, public or not.
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
#: Seconds for an address, all in all.
_SECONDS = 15.0
_DATA = re.compile(r"data:image/[a-z.+-]{1,20};base64,", re.IGNORECASE)


def _refused(why: str) -> Refused:
    return Refused(400, f"{IMAGE}: {why}", IMAGE)


def image_of(address: object, *, urls: bool) -> bytes:
    """The bytes that ``image_url`` stands for.

    Args:
        urls: addresses may be opened.

    Raises:
        Refused: it is neither data nor an address that may be opened.
    """
    if not isinstance(address, str):
        raise _refused("image_url is no text")
    if found := _DATA.match(address):
        try:
            return base64.b64decode(address[found.end() :], validate=True)
        except ValueError:
            raise _refused("the data of image_url is not base64") from None
    if not urls:
        raise _refused(
            "addresses are not opened here; upload the image, or send it as data:"
        )
    return fetched(address)


def kept_image(data: bytes, folder: Path) -> Path:
    """The file of an image, written as it came.

    Raises:
        Refused: it is no image that is read here, or has too many pixels.
    """
    from PIL import Image

    if len(data) > MOST_BYTES:
        raise Refused(413, f"{IMAGE}: has more than {MOST_BYTES} bytes", IMAGE)
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
        if image.width * image.height > MOST_PIXELS:
            size = f"{image.width}x{image.height}"
            raise _refused(f"{size} has more than {MOST_PIXELS} pixels")
        if min(image.size) < SMALLEST_SIDE:
            raise _refused(f"a side has fewer than {SMALLEST_SIDE} pixels")
        ending = _ENDINGS[str(image.format)]
        image.load()
    except Refused:
        raise
    except Exception as error:  # of many kinds, by what is damaged
        kinds = ", ".join(_FORMATS)
        raise _refused(f"is no {kinds} that can be read") from error
    file = folder / f"image{ending}"
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(file, data)
    return file


class _Pinned(http.client.HTTPSConnection):
    """A connection to the first address that answers, of those that were looked at.

    Whatever the name says later is not asked.
    """

    def __init__(
        self, host: str, port: int, addresses: list[str], context: ssl.SSLContext
    ) -> None:
        super().__init__(host, port, timeout=_SECONDS, context=context)
        self._addresses, self._own = addresses, context
        self._all: socket.socket | None = None

    def connect(self) -> None:
        """Try each address, none so long that there is no time for the others."""
        *first, last = self._addresses
        share = _SECONDS / (1 + len(first))
        plain = None
        for address in first:  # such as one of IPv6, where there is no way to it
            with contextlib.suppress(OSError):
                plain = socket.create_connection((address, self.port), share)
                break
        plain = plain or socket.create_connection((last, self.port), share)
        plain.settimeout(_SECONDS)
        self._all = plain
        self.sock = self._all = self._own.wrap_socket(plain, server_hostname=self.host)

    def end(self) -> None:
        """End the connection under whoever reads from it, in another thread."""
        if self._all is not None:
            with contextlib.suppress(OSError):
                self._all.shutdown(socket.SHUT_RDWR)


def fetched(address: str, context: ssl.SSLContext | None = None) -> bytes:
    """What lies at a public address; redirects are not followed.

    Args:
        context: of the connection.

    Raises:
        Refused: it is not public, not https, too large or too slow.
    """
    until = time.monotonic() + _SECONDS
    try:
        parts = urllib.parse.urlsplit(address)
        host, port = parts.hostname, parts.port or 443
        if parts.scheme != "https" or not host or parts.username is not None:
            raise _refused("image_url is no https address without a user")
        target = urllib.parse.quote(parts.path or "/", safe="/%:@!$&'()*+,;=-._~")
        if parts.query:
            target += "?" + urllib.parse.quote(parts.query, safe="/?%:@!$&'()*+,;=-._~")
        connection = _Pinned(
            host,
            port,
            public_addresses(host, port),
            context or ssl.create_default_context(),
        )
        # A timeout of a socket is for each part; a head may come byte by byte.
        timer = threading.Timer(_SECONDS, connection.end)
        timer.start()
        try:
            connection.request("GET", target, headers={"User-Agent": "tpuport"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise _refused(f"the address answers {answer.status}")
            return _body(answer, until)
        finally:
            timer.cancel()
            connection.close()
    except Refused:
        raise
    except (OSError, ValueError, http.client.HTTPException) as error:
        if time.monotonic() > until:
            raise _too_slow() from None
        raise _refused(f"image_url cannot be read: {one_line(error)}") from error


def _body(answer: http.client.HTTPResponse, until: float) -> bytes:
    found = bytearray()
    while chunk := answer.read1(1 << 16):
        found += chunk
        if len(found) > MOST_BYTES:
            raise _refused(f"the address has more than {MOST_BYTES} bytes")
    if time.monotonic() > until:
        raise _too_slow()
    return bytes(found)


def _too_slow() -> Refused:
    return _refused(f"the address takes more than {_SECONDS:.0f} seconds")


def public_addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, the best first, all of which are public.

    Raises:
        Refused: one is of this machine, or of a network that is not public.
    """
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    found = list(dict.fromkeys(str(one[4][0]) for one in answers))
    for text in found:
        one = ipaddress.ip_address(text.partition("%")[0])
        inner = getattr(one, "ipv4_mapped", None) or getattr(one, "sixtofour", None)
        for each in filter(None, (one, inner)):
            if not each.is_global or each.is_multicast or each in _NAT64:
                raise _refused(f"{host} is not public")
    if not found:
        raise _refused(f"{host} has no address")
    return found
