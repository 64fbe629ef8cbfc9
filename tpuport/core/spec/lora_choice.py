"""A LoRA as it is asked for: a file or a hub id, a scale and a component."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tpuport.core.files import sources
from tpuport.errors import UsageError, quoted

_SCALE = re.compile(
    r"(.+):([-+]?(?:(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|inf|nan))", re.IGNORECASE
)
_COMPONENT = re.compile(r"(.+):([a-z]\w*)")


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

    def absolute(self) -> LoraChoice:
        """The choice from any folder; a hub id stays."""
        path = Path(self.name).expanduser()
        return replace(self, name=str(path.absolute())) if path.exists() else self

    def __str__(self) -> str:
        parts = [self.name, self.component, f"{self.scale!r}"]
        return ":".join(filter(None, parts))
