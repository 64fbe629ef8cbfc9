"""What the user asked of attention: an implementation and its options, as text.

``auto``, ``blockwise:block_q=256``, ``splash:window=1024,1024;k_smooth=on``:
a name, then after a colon ``name=value`` pairs between semicolons.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from tpuport.errors import UsageError

AUTO = "auto"
NAMES = (AUTO, "splash", "reference", "blockwise")
"""What ``--attention`` takes in front of the colon."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionChoice:
    """An implementation by name, and options that it must honour or refuse.

    Attributes:
        name: ``"auto"`` or an implementation.
        window: (left, right): query i sees keys i - left .. i + right only. Results
            differ from upstream's; for self-attention.
        k_smooth: subtract the mean of the keys that count from every key. The softmax
            does not change by it; in low precision the scores are rounded less.
        block_q, block_kv, block_kv_compute: tokens per step of a kernel; ``None`` for
            the implementation's own choice.

    Raises:
        UsageError: a value out of range, or an option that the implementation never
            takes.
    """

    name: str = AUTO
    window: tuple[int, int] | None = None
    k_smooth: bool = False
    block_q: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise UsageError(
                f"unknown attention implementation {self.name!r}; known are: "
                + ", ".join(NAMES)
            )
        if self.window is not None and min(self.window) < 0:
            raise UsageError(
                f"attention window={self.window[0]},{self.window[1]}: give how many "
                "keys to the left and to the right a query sees, 0 or more"
            )
        for option in self.lacking(self.name) if self.name != AUTO else ():
            owners = _OWNERS[option]
            has = "has" if len(owners) == 1 else "have"
            raise UsageError(
                f"attention {self.name} has no {option}; {' and '.join(owners)} {has}"
            )
        kernel = self.name in (AUTO, "splash")
        for name, size in self.blocks.items():
            if size < 1 or (kernel and size % 128):
                legal = "a positive multiple of 128" if kernel else "at least 1"
                raise UsageError(f"attention {name}={size}: must be {legal}")
        kv, inner = self.block_kv, self.block_kv_compute
        if kv is not None and inner is not None and kv % inner:
            raise UsageError(
                f"attention block_kv={kv}: must be a multiple of "
                f"block_kv_compute={inner}"
            )

    @property
    def blocks(self) -> dict[str, int]:
        names = ("block_q", "block_kv", "block_kv_compute")
        sizes = {name: getattr(self, name) for name in names}
        return {name: size for name, size in sizes.items() if size is not None}

    def lacking(self, name: str) -> list[str]:
        """The options that were given and an implementation never has."""
        return [option for option in self.blocks if name not in _OWNERS[option]]

    @property
    def plain(self) -> AttentionChoice:
        """The same implementation without options."""
        return AttentionChoice(name=self.name)

    @classmethod
    def parse(cls, text: str) -> AttentionChoice:
        """Read ``NAME[:OPTION=VALUE;...]``.

        Raises:
            UsageError: an unknown name or option, or a value that is not one.
        """
        name, colon, rest = text.partition(":")
        values: dict[str, Any] = {}
        for part in rest.split(";") if colon else ():
            key, equals, value = part.partition("=")
            key = key.strip()
            if key not in _OPTIONS or not equals:
                raise UsageError(
                    f"attention option {part!r} in {text!r}: options are "
                    + ", ".join(f"{k}={form}" for k, (form, _) in _OPTIONS.items())
                    + ", separated by ';'"
                )
            if key in values:
                raise UsageError(f"attention option {key} appears twice in {text!r}")
            values[key] = _OPTIONS[key][1](key, value.strip())
        return cls(name=name.strip(), **values)

    def __str__(self) -> str:
        """As :meth:`parse` reads it; options at their defaults are left out."""
        options = []
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value == field.default:
                continue
            if isinstance(value, tuple):
                text = ",".join(map(str, value))
            else:
                text = "on" if value is True else str(value)
            options.append(f"{field.name}={text}")
        return self.name + (":" + ";".join(options) if options else "")


def _window(key: str, value: str) -> tuple[int, int]:
    left, comma, right = value.partition(",")
    try:
        return int(left), int(right if comma else left)
    except ValueError:
        raise UsageError(
            f"attention {key}={value}: expected LEFT,RIGHT or one number for both"
        ) from None


def _switch(key: str, value: str) -> bool:
    if value not in ("on", "off"):
        raise UsageError(f"attention {key}={value}: choose on or off")
    return value == "on"


def _size(key: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UsageError(f"attention {key}={value}: expected a number") from None


#: Who has an option that is not everybody's.
_OWNERS: Mapping[str, tuple[str, ...]] = {
    "block_q": ("blockwise", "splash"),
    "block_kv": ("blockwise", "splash"),
    "block_kv_compute": ("splash",),
}
#: Option -> how its value looks, and what reads it.
_OPTIONS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "window": ("LEFT,RIGHT", _window),
    "k_smooth": ("on|off", _switch),
    **dict.fromkeys(_OWNERS, ("N", _size)),
}
