"""A LoRA as it is asked for: a file or a hub id, a scale and a component."""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpuport.core.files import sources
from tpuport.errors import UsageError, WeightsError, quoted

_SCALE = re.compile(
    r"(.+):([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf|nan))", re.IGNORECASE
)
_COMPONENT = re.compile(r"(.+):([a-z]\w*)")
_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+))?")
_PICKLES = (".bin", ".ckpt", ".pt", ".pth")


@dataclass(frozen=True)
class LoraChoice:
    """``NAME[:COMPONENT][:SCALE]``.

    Attributes:
        name: a safetensors file, a folder with one, a hub id, or the hub id and a file
            of it (``owner/name/file.safetensors``).
        scale: of what the LoRA adds to the weights.
        component: whose weights, such as ``transformer_2``; empty for those that the
            keys of the file name.

    Raises:
        UsageError: the scale is no finite number.
    """

    name: str
    scale: float = 1.0
    component: str = ""

    def __post_init__(self) -> None:
        if not math.isfinite(self.scale):
            raise UsageError(
                f"{quoted(self.name)}: the scale {self.scale} is not a finite number; "
                "give a number such as 0.8"
            )

    @classmethod
    def parse(cls, value: Any) -> LoraChoice:
        """The choice that a text says.

        Raises:
            UsageError: the scale is no finite number, or there is no name.
        """
        if isinstance(value, cls):
            return value
        text = sources.here(str(value))
        scale, component = 1.0, ""
        if not Path(text).expanduser().exists():
            if found := _SCALE.fullmatch(text):
                text, scale = found[1], float(found[2])
            if found := _COMPONENT.fullmatch(text):
                text, component = found[1], found[2]
        there = Path(text).expanduser().exists()
        if not text or (":" in text and not there):
            raise UsageError(
                f"{quoted(value)} is no LoRA with a scale; give FILE_OR_HUB_ID, or "
                "FILE_OR_HUB_ID:SCALE with a number such as 0.8"
            )
        return cls(text, scale, component)

    def file(self) -> Path | None:
        """The file on this machine; ``None`` for a hub id. Nothing is read.

        Raises:
            UsageError: there is no such file, or peft is not installed.
            WeightsError: the file is a pickle.
        """
        if importlib.util.find_spec("peft") is None:
            raise UsageError(
                f"LoRA {self.name}: needs a package that is not installed: pip "
                "install 'tpuport[lora]'"
            )
        path = found = Path(self.name).expanduser()
        if not path.exists():
            # A name of two parts is a file's, and no hub id.
            looks_local = self.name.count("/") == 1 and path.suffix == ".safetensors"
            if looks_local or not on_hub(self.name)[0]:
                _refuse_pickle(self.name, path)
                raise UsageError(
                    f"LoRA {self.name} does not exist, and it is no hub id "
                    "(owner/name, or owner/name/file.safetensors) either"
                )
            return None
        if path.is_dir():
            found = path / the_one(self.name, [p.name for p in sorted(path.iterdir())])
        _refuse_pickle(self.name, found)
        if not found.is_file():
            raise UsageError(f"LoRA {self.name}: there is no file {found.name}")
        return found.absolute()

    def absolute(self) -> LoraChoice:
        """The choice from any folder; a hub id stays."""
        path = Path(self.name).expanduser()
        return replace(self, name=str(path.absolute())) if path.exists() else self

    def __str__(self) -> str:
        parts = [self.name, self.component, f"{self.scale!r}"]
        return ":".join(filter(None, parts))


def on_hub(name: str) -> tuple[str, str]:
    """The hub id in a name, and the file of it; empty where there is none."""
    found = None if name.endswith(_PICKLES) else _HUB_FILE.fullmatch(name)
    return (found[1], found[2] or "") if found else ("", "")


def _refuse_pickle(name: str, path: Path) -> None:
    if path.suffix in _PICKLES:
        raise WeightsError(
            f"LoRA {name}: is a pickle file; pickle files can run code and are not "
            "read. Convert it to safetensors"
        )


def the_one(name: str, files: Sequence[str]) -> str:
    """The one file of a LoRA among the files of a folder."""
    there = [f for f in files if f.endswith(".safetensors")]
    usual = [f for f in there if f.endswith("pytorch_lora_weights.safetensors")]
    if len(usual or there) == 1:
        return (usual or there)[0]
    pickles = [f for f in files if f.endswith(_PICKLES)]
    if not there and pickles:
        _refuse_pickle(f"{name}/{pickles[0]}", Path(pickles[0]))
    if not there:
        raise UsageError(f"LoRA {name}: holds no safetensors file")
    raise UsageError(
        f"LoRA {name}: holds {len(there)} safetensors files; name one, such as "
        f"{name.rstrip('/')}/{there[0]}"
    )
