"""From the body of a request to its fields and its image: JSON, or a form."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from tpuport.cli.batches.requests import object_of
from tpuport.cli.server.fields import IMAGE, IMAGE_URL, of_text
from tpuport.cli.server.guard import MOST_BODY
from tpuport.cli.server.messages import Refused
from tpuport.errors import TpuportError, in_one_line, quoted

#: Bytes of JSON beside an image: to read more takes seconds.
_MOST_JSON = 1 << 20
_IMAGE = re.compile(rb'"data:image/[^"]*"')
#: By which a client asks for the same job again.
KEY = "Idempotency-Key"
_KEY = re.compile(r"[!-~]{1,255}")


def key_of(request: Request) -> str | None:
    """The key by which a client asks for the same job again, if any.

    Raises:
        Refused: it is no key.
    """
    key = request.headers.get(KEY)
    if key is not None and not _KEY.fullmatch(key):
        message = f"{KEY}: give 1 to 255 letters, digits and signs without a space"
        raise Refused(400, message, KEY)
    return key


def digest_of(given: dict[str, Any], image: Any) -> str:
    """What two requests share that ask for the same.

    Raises:
        Refused: the fields are nested too deep.
    """
    own = hashlib.sha256(image).hexdigest() if isinstance(image, bytes) else image
    try:
        text = json.dumps([given, own], sort_keys=True)
    except RecursionError:
        raise Refused(400, "the body is nested too deep") from None
    return hashlib.sha256(text.encode()).hexdigest()


async def asked_of(request: Request) -> tuple[dict[str, Any], Any]:
    """The fields of a request, and its image: bytes, an address, or nothing.

    Raises:
        Refused: it is neither JSON nor a form.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0]
    if kind.strip().lower() == "multipart/form-data":
        try:
            return await _of_form(request)
        except (UnicodeError, LookupError):
            raise Refused(400, "the form has no charset that is known") from None
    if kind.strip().lower() != "application/json":
        message = f"the content type {quoted(kind)} is neither application/json nor "
        raise Refused(400, message + "multipart/form-data")
    body = await request.body()
    if len(_IMAGE.sub(b"", body)) > _MOST_JSON:
        message = f"the body has more than {_MOST_JSON} bytes beside the image"
        raise Refused(413, message)
    try:
        given = await run_in_threadpool(object_of, body.decode(), "the body")
    except UnicodeDecodeError:
        raise Refused(400, "the body is not UTF-8") from None
    except TpuportError as error:
        raise Refused(400, in_one_line(error)) from error
    image = given.pop(IMAGE, None)
    if image is None:
        return given, None
    if not isinstance(image, dict) or set(image) != {"image_url"}:
        message = f'{IMAGE}: give {{"image_url": "data:image/png;base64,..."}}'
        raise Refused(400, message, IMAGE)
    return given, image["image_url"] if image["image_url"] is not None else ""


class _Whole(MultiPartParser):
    """Knows whether the end of a form came: what is cut lacks fields."""

    ended = False

    def on_end(self) -> None:
        """The last boundary came."""
        super().on_end()
        self.ended = True


async def _of_form(request: Request) -> tuple[dict[str, Any], Any]:
    # A field may be as large as an image that is sent as text.
    limits = {"max_files": 1, "max_fields": 64, "max_part_size": MOST_BODY}
    parser = _Whole(request.headers, request.stream(), **limits)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Refused(400, f"the form cannot be read: {error.message}") from error
    try:
        if not parser.ended:
            raise Refused(400, "the form is cut: its last boundary did not come")
        return await _fields_of(form)
    finally:
        await form.close()


async def _fields_of(form: FormData) -> tuple[dict[str, Any], Any]:
    given: dict[str, Any] = {}
    image: Any = None
    for name, value in form.multi_items():
        if isinstance(value, UploadFile) or name in (IMAGE, IMAGE_URL):
            if image is not None or name not in (IMAGE, IMAGE_URL):
                message = f"{quoted(name)}: one file is taken, as {IMAGE}"
                raise Refused(400, message, name[:100])
            image = value
            if isinstance(value, UploadFile):
                image = await value.read()
            elif name == IMAGE:
                raise Refused(400, f"{IMAGE}: is no file", IMAGE)
            continue
        _put(given, name, value)
    return of_text(given), image


def _put(given: dict[str, Any], name: str, value: str) -> None:
    """Put a field of a form where it belongs: ``lora[]``, ``extra[NAME]``."""
    if name.startswith("extra[") and name.endswith("]"):
        options = given.setdefault("extra", {})
        if not isinstance(options, dict) or name in options:
            raise Refused(400, f"{quoted(name)}: is given twice", "extra")
        try:
            options[name[6:-1]] = json.loads(value)
        except (ValueError, RecursionError):
            options[name[6:-1]] = value
        return
    key = name.removesuffix("[]")
    if key == "lora":
        given.setdefault("lora", []).extend(_listed(value))
    elif key in given:
        raise Refused(400, f"{quoted(key)}: is given twice; keep one", key[:100])
    else:
        given[key] = value


def _listed(value: str) -> list[Any]:
    """The LoRAs of a field: a name, or a list in JSON."""
    if value.startswith("["):
        try:
            return list(json.loads(value))
        except (ValueError, RecursionError):
            raise Refused(400, f"lora: {quoted(value)} is no list", "lora") from None
    return [value]
