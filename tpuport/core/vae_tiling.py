"""Whether decode runs in tiles: asked for, or decided from what a device can hold.

The decision is made before anything is compiled, from the port's own estimate; where
the compiler then says that the program does not fit after all, it is made again. A
stage without an estimate decides by itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tpuport.errors import TpuportError, UsageError

CHOICES = ("auto", "on", "off")
"""What ``--vae-tiling`` takes."""


class DoesNotFitError(TpuportError):
    """A program needs more memory than a device has.

    Attributes:
        bytes: that a device would need, as the compiler says.
        limit: that it has.
    """

    def __init__(self, name: str, needed: int, limit: int) -> None:
        super().__init__(
            f"{name} needs {gibibytes(needed)} of a device, which has "
            f"{gibibytes(limit)} for it; use --vae-tiling on, more devices or a "
            "smaller size"
        )
        self.bytes = needed
        self.limit = limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Footprint:
    """What a stage takes of one device, estimated from shapes.

    Attributes:
        bytes: at the peak: weights, inputs, outputs, what is carried, temporaries.
        tiles: how it is cut, in words; empty for a form without tiles.
    """

    bytes: int
    tiles: str = ""

    @property
    def form(self) -> str:
        """For people."""
        return f"tiled: {self.tiles}" if self.tiles else "untiled"


@dataclass(frozen=True, kw_only=True, slots=True)
class TilingDecision:
    """How a stage runs, and why.

    Attributes:
        stage: its name.
        asked: ``"auto"``, ``"on"`` or ``"off"``.
        chosen: how it runs.
        other: how it would run with the other setting; ``None`` where that is the same.
        limit: bytes of a device for it; ``None`` where nothing is known.
        compiled: bytes of the untiled program by the compiler, where they were more
            than ``limit``, against the estimate.
    """

    stage: str
    asked: str
    chosen: Footprint
    other: Footprint | None = None
    limit: int | None = None
    compiled: int | None = None

    @property
    def tiled(self) -> bool:
        """Whether it runs in tiles."""
        return bool(self.chosen.tiles)

    @property
    def fits(self) -> bool:
        """Whether the estimate is within the limit; true where there is none."""
        return self.limit is None or self.chosen.bytes <= self.limit

    @property
    def room(self) -> int | None:
        """What a compiled program may take at most; ``None`` where nothing hangs on it.

        Only where tiles were not chosen, and can be.
        """
        weighed = self.asked == "auto" and not self.tiled and self.other is not None
        return self.limit if weighed else None

    def line(self) -> str:
        """For people."""
        room = "" if self.limit is None else f" of {gibibytes(self.limit)}"
        text = (
            f"{self.stage}: about {gibibytes(self.chosen.bytes)}{room} a device, "
            f"{self.chosen.form}"
        )
        if self.compiled is not None:
            text += f" (untiled it compiles to {gibibytes(self.compiled)})"
        if not self.fits:
            text += "; that may not fit"
        return text

    def alternative(self) -> str:
        """What would be with the other setting, for people; or nothing."""
        if self.other is None:
            return ""
        setting = "off" if self.tiled else "on"
        return (
            f"with --vae-tiling {setting}: about {gibibytes(self.other.bytes)} a "
            f"device, {self.other.form}"
        )

    def in_tiles(self, compiled: int) -> TilingDecision:
        """The same in tiles, after the untiled program was found to be too large."""
        assert self.other is not None
        return replace(self, chosen=self.other, other=self.chosen, compiled=compiled)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with what people are told."""
        return {
            **asdict(self),
            "tiled": self.tiled,
            "fits": self.fits,
            "line": self.line(),
            "alternative": self.alternative(),
        }


def check_choice(choice: str) -> str:
    """``choice``, if it is one of :data:`CHOICES`.

    Raises:
        UsageError: it is not.
    """
    if choice not in CHOICES:
        raise UsageError(f"vae_tiling {choice!r}: choose one of {', '.join(CHOICES)}")
    return choice


def decide(
    stage: str, asked: str, untiled: Footprint, tiled: Footprint, limit: int | None
) -> TilingDecision:
    """Tiles where they were asked for, or where what fits is not without.

    Args:
        untiled, tiled: the estimates; both without tiles where upstream has one tile
            for the size, which is then no choice.
        limit: bytes of a device; without it, ``auto`` does not tile. Where neither form
            is within it, ``auto`` takes the smaller one.
    """
    known: dict[str, Any] = {"stage": stage, "asked": check_choice(asked)}
    if not tiled.tiles:
        return TilingDecision(**known, chosen=untiled, limit=limit)
    # Tiles that are whole in time may take more than chunks of the whole picture.
    full = limit is not None and untiled.bytes > max(limit, tiled.bytes)
    wanted = asked == "on" or (asked == "auto" and full)
    chosen, other = (tiled, untiled) if wanted else (untiled, tiled)
    return TilingDecision(**known, chosen=chosen, other=other, limit=limit)


def gibibytes(size: float) -> str:
    """Bytes for people."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.1f} MiB"
