"""From the body of a request to its fields and its image: JSON, or a form."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from typing import Any

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from tpuport.cli.batches.requests import object_of
from tpuport.cli.server.fields import IMAGE, of_text
from tpuport.cli.server.guard import MOST_BODY
from tpuport.cli.server.messages import Refused
from tpuport.errors import TpuportError, in_one_line, quoted

#: Bytes of JSON beside an image: to read more takes seconds.
_MOST_JSON = 1 << 20
_IMAGE = re.compile(rb'"data:image/[^"]*"')
#: Fields of a form, and keys in one's name.
_MOST_FIELDS, _DEEPEST = 1000, 8
#: The name of a field in an object or a list of a form, and the keys within.
_NAME = re.compile(r"([^][]+)((?:\[[^][]*\])*)")
_INNER = re.compile(r"\[([^][]*)\]")
#: Names of ``extra``; of options in it; and of an image.
_EXTRA = ("extra_params", "diffusers_kwargs")
_OPTIONS = ("guidance_scale_2", "true_cfg_scale")
_IMAGES = ("image_reference", "reference_url")
#: Names in the object of a LoRA; its number is the other engine's own.
_LORA = {"name": "name", "lora_name": "name", "adapter": "name", "scale": "scale"}
_LORA |= {"lora_scale": "scale", "int_id": "number", "lora_int_id": "number"}
#: What is text in a form, whatever it looks like.
_TEXTS = ("lora", IMAGE, *_IMAGES)
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
    return _as_here(given, None)


class _Whole(MultiPartParser):
    """Knows whether the end of a form came: what is cut lacks fields."""

    ended = False

    def on_end(self) -> None:
        """The last boundary came."""
        super().on_end()
        self.ended = True


async def _of_form(request: Request) -> tuple[dict[str, Any], Any]:
    # A field may be as large as an image that is sent as text.
    limits = {"max_files": 1, "max_fields": _MOST_FIELDS, "max_part_size": MOST_BODY}
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
    image, size = None, 0
    for name, value in form.multi_items():
        if isinstance(value, UploadFile):
            if image is not None or name != IMAGE:
                message = f"{quoted(name)}: one file is taken, as {IMAGE}"
                raise Refused(400, message, name[:100])
            image = await value.read()
            continue
        size += 0 if value.startswith("data:image/") else len(value)
        if size > _MOST_JSON:
            message = f"the form has more than {_MOST_JSON} bytes beside the image"
            raise Refused(413, message)
        _put(given, name, value)
    return _as_here(of_text(given), image)


def _put(given: dict[str, Any], name: str, value: str) -> None:
    """Put a field of a form where it belongs: ``lora[]``, ``extra[NAME][]``.

    So the package of OpenAI writes lists and objects.
    """
    found = _NAME.fullmatch(name)
    keys = [found[1], *_INNER.findall(found[2])] if found else [name]
    if keys[0] == "extra_body" and len(keys) > 1:
        del keys[0]
    if len(keys) > _DEEPEST:
        raise Refused(400, f"{quoted(name)}: is nested too deep", keys[0][:100])
    if "" in keys[1:-1]:
        message = f"{quoted(name)}: what a list holds cannot be told apart in a form; "
        message += f"give {quoted(keys[0])} as JSON text"
        raise Refused(400, message, keys[0][:100])
    if keys in (["lora"], ["lora", ""]) and isinstance(given.get("lora", []), list):
        return given.setdefault("lora", []).extend(_listed(value))
    leaf: Any = value
    if len(keys) > 1 and keys[0] not in _TEXTS:
        with contextlib.suppress(ValueError, RecursionError):
            leaf = json.loads(value)
    listed = len(keys) > 1 and not keys[-1]
    *inner, last = keys[:-1] if listed else keys
    holder: Any = given
    for key in inner:
        holder = holder.setdefault(key, {}) if isinstance(holder, dict) else None
    if isinstance(holder, dict) and listed:
        old = holder.setdefault(last, [])
        if isinstance(old, list):
            return old.append(leaf)
    elif isinstance(holder, dict) and last not in holder:
        holder[last] = leaf
        return None
    message = f"{quoted(name)}: is given twice, or in two ways; keep one"
    raise Refused(400, message, keys[0][:100])


def _listed(value: str) -> list[Any]:
    """The LoRAs of a field: a name, or in JSON an object or a list."""
    if not value.startswith(("[", "{")):
        return [value]
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        raise Refused(400, f"lora: {quoted(value)} is no JSON", "lora") from None
    return found if isinstance(found, list) else [found]


# --- what clients of other engines send: docs/serve.md says which


def _as_here(given: dict[str, Any], image: Any) -> tuple[dict[str, Any], Any]:
    """Fields by the names of this server, and the image.

    Args:
        image: a file of a form.

    Raises:
        Refused: something is given twice, or is no object.
    """
    _add(given, _object(given, "extra_body"), "")
    given.pop("user", None)
    options = [(name, _object(given, name)) for name in _EXTRA]
    options += [(name, {name: given.pop(name, None)}) for name in _OPTIONS]
    for name, found in options:
        if found := {key: one for key, one in found.items() if one is not None}:
            if given.get("extra") is None:
                given["extra"] = {}
            _add(given["extra"], found, name)
    sides = [given.pop(name, None) for name in ("width", "height")]
    if sides != [None, None]:
        if None in sides or given.get("size") is not None:
            raise Refused(400, "width and height: give both, and no size", "size")
        given["size"] = "x".join(map(str, sides))
    if isinstance(lora := given.get("lora"), dict | list):
        loras = lora if isinstance(lora, list) else [lora]
        given["lora"] = [_lora(one) for one in loras]
    for name in (IMAGE, *_IMAGES):
        if (value := given.pop(name, None)) is None:
            continue
        if image is not None:
            raise Refused(400, f"{name}: one image is taken", name)
        image = _address(name, value)
    return given, image


def _add(known: Any, found: dict[str, Any], where: str) -> None:
    if not isinstance(known, dict):
        raise Refused(400, "extra: is no JSON object", "extra")
    for name, value in found.items():
        if name in known:
            message = f"{where}{': ' * bool(where)}{quoted(name)} is given twice"
            raise Refused(400, f"{message}; keep one", where or name[:100])
        known[name] = value


def _object(given: dict[str, Any], name: str) -> dict[str, Any]:
    """An object, or its JSON text; taken away."""
    value = given.pop(name, None)
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value is not None and not isinstance(value, dict):
        raise Refused(400, f"{name}: is no JSON object", name)
    return value or {}


def _lora(one: Any) -> Any:
    """A LoRA as NAME:SCALE, of the object that vLLM-Omni takes."""
    if not isinstance(one, dict):
        return one
    found: dict[str, Any] = {}
    for key, value in one.items():
        short = _LORA.get(key)
        if short is None:
            message = f"lora: {quoted(key)} is not taken; give name, of a LoRA that the"
            raise Refused(400, f"{message} server has, and scale", "lora")
        found[short] = value
    name, scale = found.get("name"), found.get("scale")
    if not isinstance(name, str):
        raise Refused(400, "lora: an object has no name", "lora")
    return name if scale is None else f"{name}:{scale}"


def _address(name: str, value: Any) -> str:
    """What an image is read from; not looked at yet."""
    if isinstance(value, str) and value.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or set(value) != {"image_url"}:
        message = f'{name}: give {{"image_url": "data:image/png;base64,..."}}'
        raise Refused(400, message, name)
    return value["image_url"] if value["image_url"] is not None else ""
