"""From the lines of a file to requests: settings, a key, and what makes programs."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tpuport.cli.asked.first import count_of
from tpuport.cli.asked.settings import Settings, of_line
from tpuport.core.files.atomic import one_line
from tpuport.core.files.run_lock import LOCK_FILE
from tpuport.core.files.stores import AnyPath
from tpuport.core.files.typed import read_text
from tpuport.core.files.video_file import numbered, output_of
from tpuport.core.spec.run_settings import (
    Asked,
    RunSettings,
    defaults_of,
    read_value,
)
from tpuport.errors import TpuportError, UsageError, quoted

#: What decides nothing of a video: where files are, and how a run is looked at.
_AROUND = (
    *("cache_dir", "cache_store", "compile_cache", "executables", "memory_report"),
    *("profile", "profile_calls", "no_jit"),
)
#: The files that a request starts from, whose content counts.
_READ = ("image", "video", "latents")
#: What differs between requests that run the same programs.
_VALUES = ("prompt", "negative_prompt", "seed", "fps", "num_inference_steps", *_READ)
#: What differs between requests that one call makes.
_OWN = ("prompt", "negative_prompt", "seed")
#: What decides no video, and yet is of the whole call.
_OF_A_CALL = (*_AROUND, "batch_size", "checkpoint_every")
#: What a pipeline is opened with.
_OPENED = {f.name for f in fields(RunSettings)} | {"on_host", "step_cache"}

#: In the folder of a batch, beside the videos.
RESULTS, ERRORS, RUNS = "results.jsonl", "errors.jsonl", "runs"
_ID = re.compile(r"[A-Za-z0-9_][\w.+-]{0,99}", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Request:
    """One line.

    Attributes:
        line: its number, from 1.
        key: names its videos and its run directory.
        digest: sha256 of all that decides the videos.
        pipeline, shape: digests of what a pipeline is opened with, and of what its
            programs are made for.
        alike: of what the requests of one call have in common; see
            :func:`tpuport.cli.batches.packs.packs`.
        settings: with the place of the videos.
    """

    line: int
    key: str
    digest: str
    pipeline: str
    shape: str
    alike: str
    settings: Settings

    @property
    def paths(self) -> list[AnyPath]:
        """The videos, each a file or a folder of PNGs, maybe in a store."""
        assert self.settings.out is not None
        place, kind = output_of(self.settings.out)
        return numbered(place, kind, self.count)

    @property
    def count(self) -> int:
        """How many videos."""
        return count_of(self.settings)

    @property
    def alone(self) -> bool:
        """Whether the request shares no call: it has no prompt, or has a file."""
        return not self.settings.prompt or any(
            getattr(self.settings, name) for name in _READ
        )


def text_of(file: AnyPath | None) -> str:
    """The text of a file of requests; without one, of the standard input.

    Raises:
        UsageError: the file cannot be read.
        StoreError: the store does not answer.
    """
    if file is None:
        return sys.stdin.buffer.read().decode("utf-8-sig", "surrogateescape")
    return read_text(file, "file of requests", "surrogateescape")


def read_requests(
    text: str, folder: AnyPath, below: Settings
) -> Iterator[Request | tuple[int, str]]:
    """The requests of JSON lines, or the number of a line and its fault.

    Blank lines are skipped.

    Args:
        folder: for the videos.
        below: what the flags of the command say; a line wins.
    """
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            where = f"line {number}"
            yield request_of(number, object_of(line, where), where, folder, below)
        except (TpuportError, OSError, RuntimeError) as error:
            yield number, one_line(error)


def request_of(
    number: int, values: dict[str, Any], where: str, folder: AnyPath, below: Settings
) -> Request:
    """The request that values say; see :func:`read_requests`.

    Args:
        number: of the line.
        values: by the keys of a line; ``id`` is taken out.
        where: the request is, for messages.

    Raises:
        UsageError: a key or a value is wrong.
    """
    name = values.pop("id", None)
    if name is not None and not _ID.fullmatch(str(name)):
        raise UsageError(
            f"{where}: id: {quoted(name)} names no file; use up to 100 letters, "
            "digits, -, _, + and ."
        )
    settings = of_line(values, where, replace(below, out=None))
    decides = _decides(settings)
    digest = _digest(decides)
    key = str(name) if name is not None else digest[:16]
    out = settings.out or f"{key}.mp4"
    if len(Path(out).parts) != 1 or Path(out).name in ("", ".", ".."):
        raise UsageError(
            f"{where}: out: {quoted(out)} is not in the folder of the batch; give a "
            "name alone, such as fox.gif"
        )
    if Path(out).name in (RUNS, RESULTS, ERRORS, LOCK_FILE):
        raise UsageError(f"{where}: out: {quoted(out)} is a file of the batch itself")
    read_value(output_of, out, f"{where}: out")  # refuses what is no video
    place = f"{folder / out}{'/' * out.endswith('/')}"
    programs = {n: v for n, v in decides.items() if n not in _VALUES}
    given = {n: True for n in _READ if n in decides}
    programs["batch_size"] = settings.batch_size
    together = {n: v for n, v in decides.items() if n not in _OWN}
    together |= {n: str(getattr(settings, n)) for n in _OF_A_CALL}
    together["prompt"] = bool(settings.prompt)
    together["negative_prompt"] = settings.negative_prompt is not None
    return Request(
        line=number,
        key=key,
        digest=digest,
        pipeline=_digest({n: v for n, v in programs.items() if n in _OPENED}),
        shape=_digest({**programs, **given}),
        alike=_digest(together),
        settings=replace(settings, out=place, overwrite=True),
    )


def object_of(line: str, where: str) -> dict[str, Any]:
    """The JSON object of a text.

    Args:
        where: the text is, for messages.

    Raises:
        UsageError: it is no JSON object, or has a key twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
            raise UsageError(f"{where}: has the key {quoted(twice)} twice; keep one")
        return found

    try:
        values = json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{where}: is not JSON: {one_line(error)}") from error
    if not isinstance(values, dict):
        raise UsageError(f'{where}: is not a JSON object such as {{"prompt": "a fox"}}')
    return values


def _decides(settings: Settings) -> dict[str, Any]:
    """All that decides the videos and is not a default, JSON-ready.

    With how many others a video is made is none of it.
    """
    defaults = defaults_of(Settings)
    names = [f.name for kind in (Asked, RunSettings) for f in fields(kind)]
    names += ["latents", "on_host"]
    found: dict[str, Any] = {}
    for name in names:
        if name in _AROUND or name not in defaults:
            continue
        value = getattr(settings, name)
        if value != defaults[name]:
            found[name] = _plain(value)
    for name in _READ:
        if name in found and Path(found[name]).expanduser().is_file():
            content = Path(found[name]).expanduser().read_bytes()
            found[name] = [found[name], hashlib.sha256(content).hexdigest()]
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if isinstance(value, bool | int | float) else str(value)


def _digest(values: Mapping[str, Any]) -> str:
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
