"""From text, YAML or Python values to typed settings: the one place that parses them.

A kind returns a typed value, also of a typed value; it raises TypeError or ValueError
with the end of a sentence ("is not text"), or a TpuportError of its own.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from tpuport.core.arrays import dtype_name
from tpuport.core.enums import (
    Backend,
    Blocks,
    Dtype,
    Place,
    StageName,
    Tiling,
    WeightsOn,
    Word,
)
from tpuport.core.files import sources, stores
from tpuport.core.files.run_record import CheckpointEvery
from tpuport.core.files.typed import read_text
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.spec.lora_choice import LoraChoice
from tpuport.core.spec.step_cache import StepCache
from tpuport.errors import UsageError
from tpuport.kernels.attention.choice import AttentionChoice

Kind = Callable[[Any], Any]
T = TypeVar("T", bound=Word)

#: The most that a picture is wider than high, or higher than wide.
MOST_ASPECT = 4


def _other(value: Any, needed: str) -> TypeError:
    """The error for a value of another type."""
    found = "is a list, not" if isinstance(value, list | tuple) else "is not"
    return TypeError(f"{found} {needed}")


def text(value: Any) -> str:
    """A string that can be written to a file."""
    if not isinstance(value, str):
        raise _other(value, "text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"is not valid Unicode: character {error.start + 1} is half of a "
            "surrogate pair, or a byte that is not UTF-8"
        ) from None
    if "\0" in value:
        raise ValueError("has a NUL character, which no name or text may have")
    return value


def path(value: Any) -> Path:
    """A file or a folder."""
    if isinstance(value, Path):
        return value.expanduser()
    if not text(value):
        raise ValueError("is empty")
    return Path(sources.here(value)).expanduser()


def any_path(value: Any) -> stores.AnyPath:
    """A file or a folder, here or in a store."""
    if isinstance(value, stores.StorePath):
        return value
    found = stores.place(value) if isinstance(value, str) else None
    return found if isinstance(found, stores.StorePath) else path(value)


def weights(value: Any) -> str | Path:
    """A hub id, a folder, or the address of a folder in a store."""
    if isinstance(value, Path):
        return value
    if not text(value):
        raise ValueError("is empty; give a folder or a hub id")
    found = stores.place(value)
    return str(found) if isinstance(found, stores.StorePath) else sources.here(value)


def media(value: Any) -> str:
    """The name of a file that a run starts from."""
    if not text(value):
        raise ValueError("is empty; give a file")
    return sources.here(value)


def texts(value: Any) -> tuple[str, ...]:
    """One string or several."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(text(item) for item in values)


def prompts(value: Any) -> tuple[str, ...]:
    """One prompt or several, each with a word in it."""
    found = texts(value)
    if not all(one.strip() for one in found):
        raise ValueError('is empty; say what to show, such as "a red fox in the snow"')
    return found


def loras(value: Any) -> tuple[LoraChoice, ...]:
    """One LoRA or several, each as :meth:`LoraChoice.parse`."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(
        one if isinstance(one, LoraChoice) else LoraChoice.parse(_path_text(one))
        for one in values
    )


def _path_text(value: Any) -> str:
    return str(value) if isinstance(value, Path) else text(value)


def integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _other(value, "an integer")
    return value


def positive(value: Any) -> int:
    """A whole number from 1 on."""
    if integer(value) < 1:
        raise ValueError("is not positive; give at least 1")
    return int(value)


def number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _other(value, "a number")
    try:
        found = float(value)
    except OverflowError:
        raise ValueError("is too large") from None
    if not math.isfinite(found):
        raise ValueError("is no finite number")
    return found


def number_over_0(value: Any) -> float:
    if number(value) <= 0:
        raise ValueError("is not positive; give a number such as 8")
    return float(value)


def share(value: Any) -> float:
    """A number in (0, 1]."""
    if not 0 < number(value) <= 1:
        raise ValueError("is not in (0, 1]; give a number such as 0.7")
    return float(value)


def number_from_0(value: Any) -> int:
    """A whole number from 0 on."""
    if integer(value) < 0:
        raise ValueError("is negative")
    return value


def address(value: Any) -> tuple[str, int]:
    """A host and a port."""
    host, colon, port = text(value).rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError("is no HOST:PORT, such as 10.0.0.1:8476")
    return host, int(port)


def flag(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise TypeError("is neither true nor false")
    return value


def seeds(value: Any) -> tuple[int, ...]:
    """Whole numbers, each alone or several as ``"1,2,3"``."""
    found: list[int] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        for part in item.split(",") if isinstance(item, str) else [item]:
            if isinstance(part, str):
                if not re.fullmatch(r"\s*-?[0-9]+\s*", part):
                    raise ValueError("is not an integer, or several as 1,2,3")
                part = int(part)
            found.append(integer(part))
            if not -(2**63) <= found[-1] < 2**63:
                raise ValueError("has more than 64 bits; give a seed such as 7")
    if not found:
        raise ValueError("is empty; give a seed such as 7")
    return tuple(found)


def size(value: Any) -> tuple[int, int]:
    """(width, height) of ``"720x480"``."""
    match = re.fullmatch(r"\s*([0-9]+)\s*[xX×]\s*([0-9]+)\s*", text(value))
    if match is None:
        raise ValueError("is not WIDTHxHEIGHT, such as 720x480")
    width, height = int(match[1]), int(match[2])
    if not width or not height:
        raise ValueError("is empty; width and height are at least 1")
    return width, height


def aspect_ratio(value: Any) -> tuple[float, float] | None:
    """(height, width) of ``"16:9"``."""
    if value is None or isinstance(value, tuple):
        return value
    side = r"(\d+(?:\.\d+)?)"
    match = re.fullmatch(rf"\s*{side}\s*[:x/]\s*{side}\s*", str(value))
    if match is None or not float(match[1]) or not float(match[2]):
        raise ValueError("is not WIDTH:HEIGHT, such as 16:9")
    height, width = float(match[2]), float(match[1])
    if max(height / width, width / height) > MOST_ASPECT:
        raise ValueError("is out of range: shapes go from 1:4 to 4:1")
    return height, width


def size_class(value: Any) -> str:
    """``"480p"``, or ``"480"``."""
    if not re.fullmatch(r"[1-9][0-9]{1,4}p?", text(value)):
        raise ValueError("is no size class; give one such as 480p")
    return str(value)


def options(value: Any) -> dict[str, Any]:
    """A mapping, or texts of the form ``NAME=VALUE``."""
    found: dict[str, Any] = {}
    if isinstance(value, Mapping):
        found = {str(name): item for name, item in value.items()}
        try:
            json.dumps(found, allow_nan=False)  # as runs and sidecars keep them
        except (TypeError, ValueError):
            raise ValueError("holds more than texts, numbers and lists") from None
        return found
    for item in value if isinstance(value, list) else [value]:
        name, equals, rest = text(item).partition("=")
        if not equals or not name.strip():
            raise ValueError("is not NAME=VALUE, such as max_sequence_length=128")
        found[name.strip().replace("-", "_")] = rest.strip()
    return found


def _word(words: type[T]) -> Callable[[Any], T]:
    def parse(value: Any) -> T:
        if value not in list(words):
            raise ValueError(f"is none of {', '.join(words)}")
        return words(value)

    return parse


blocks = _word(Blocks)
backend = _word(Backend)
place = _word(Place)

weights_on = _word(WeightsOn)
stage = _word(StageName)


def tiling(value: Any) -> Tiling:
    """A :class:`Tiling`; YAML reads a bare ``on`` as true."""
    if value == "auto":
        raise ValueError("is gone: give on or off, or leave it to upstream's pipeline")
    found = ("off", "on")[value] if isinstance(value, bool) else value
    if found not in (Tiling.ON, Tiling.OFF):
        raise ValueError("is none of on, off")
    return Tiling(found)


def stages(value: Any) -> tuple[StageName, ...]:
    """One stage or several; all for true, none for false."""
    if isinstance(value, bool):
        return tuple(StageName) if value else ()
    return tuple(stage(name) for name in texts(value))


def dtype(value: Any) -> Dtype:
    """The name of a dtype, or torch's, jax's or NumPy's dtype itself.

    Raises:
        UsageError: weights cannot be of that dtype.
    """
    name = dtype_name(value)
    name = {"fp32": "float32", "bf16": "bfloat16"}.get(name, name)
    if name not in list(Dtype):
        why = " (TPUs have no float16 units and T5 overflows in float16)"
        raise UsageError(
            f"dtype {name!r} is not supported; choose one of {', '.join(Dtype)}"
            + (why if name in ("float16", "fp16", "half") else "")
        )
    return Dtype(name)


def mesh(value: Any) -> MeshSpec:
    """As :meth:`MeshSpec.parse`."""
    return MeshSpec.parse(value)


def step_cache(value: Any) -> StepCache | None:
    """As :meth:`StepCache.parse`."""
    return StepCache.parse(value)


checkpoint_every = CheckpointEvery.parse


def attention(value: Any) -> AttentionChoice:
    """As :meth:`AttentionChoice.parse`."""
    if isinstance(value, AttentionChoice):
        return value
    return AttentionChoice.parse(text(value))


def read_prompts(path: Path) -> tuple[str, ...]:
    """The prompts of a file, one a line.

    Raises:
        UsageError: it cannot be read, or holds none.
    """
    lines = [line.strip() for line in read_text(path, "--prompt-file").splitlines()]
    prompts = tuple(line for line in lines if line and not line.startswith("#"))
    if not prompts:
        raise UsageError(
            f"--prompt-file {path} holds no prompt; write one on each line (blank "
            "lines and lines that start with # are skipped)"
        )
    return prompts
