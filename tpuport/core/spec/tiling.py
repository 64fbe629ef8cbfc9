"""Whether decode runs in tiles: asked for, or decided from what a device can hold.

The decision is made before anything is compiled, from the port's own estimate; where
the compiler then says that a program does not fit after all, it is made again, and
where no form is left the stage ends before that program is called. A stage without an
estimate decides by itself.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tpuport.errors import TpuportError, UsageError

CHOICES = ("auto", "on", "off")
"""What ``--vae-tiling`` takes."""


class DoesNotFitError(TpuportError):
    """A program needs more memory than a device has.

    Args:
        then: what to do about it.

    Attributes:
        name: of the stage and the program.
        bytes: that a device would need, as the compiler says.
        limit: that it has.
    """

    def __init__(self, name: str, needed: int, limit: int, then: str = "") -> None:
        super().__init__(
            f"{name} needs {gibibytes(needed)} of a device, which has "
            f"{gibibytes(limit)} for it{then}"
        )
        self.name = name
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

    @property
    def manner(self) -> str:
        """The same in a sentence."""
        return "in tiles" if self.tiles else "untiled"


@dataclass(frozen=True, kw_only=True, slots=True)
class TilingDecision:
    """How a stage runs, and why.

    Attributes:
        stage: its name.
        asked: ``"auto"``, ``"on"`` or ``"off"``.
        chosen: how it runs.
        other: how it would run with the other setting; ``None`` where that is the same.
        limit: bytes of a device for it; ``None`` where nothing is known.
        compiled: bytes of ``other`` by the compiler, where that was tried first and
            they were more than ``limit``, against the estimate.
        seconds: that went into trying it, compiling included.
        needed: bytes of the largest program of ``chosen`` by the compiler; ``None``
            before it is compiled, and where the compiler does not tell.
    """

    stage: str
    asked: str
    chosen: Footprint
    other: Footprint | None = None
    limit: int | None = None
    compiled: int | None = None
    seconds: float = 0.0
    needed: int | None = None

    @property
    def tiled(self) -> bool:
        """Whether it runs in tiles."""
        return bool(self.chosen.tiles)

    @property
    def setting(self) -> str:
        """``"on"`` or ``"off"``, as the stage's plan reads it."""
        return "on" if self.tiled else "off"

    @property
    def fits(self) -> bool:
        """Whether it is within the limit; true where there is none.

        By the compiler's figure where there is one, else by the estimate.
        """
        size = self.chosen.bytes if self.needed is None else self.needed
        return self.limit is None or size <= self.limit

    @property
    def room(self) -> int | None:
        """What a compiled program may take at most; ``None`` where nothing is weighed.

        An estimate alone refuses nothing: it errs on the high side.
        """
        return self.limit if self.asked == "auto" else None

    def line(self) -> str:
        """What is known before it is compiled, for people."""
        room = "" if self.limit is None else f" of {gibibytes(self.limit)}"
        text = (
            f"{self.stage}: about {gibibytes(self.chosen.bytes)}{room} a device, "
            f"{self.chosen.form}"
        )
        if self.asked == "on" and not self.tiled:
            text += ", as the picture is one of upstream's tiles"
        if self.compiled is not None and self.other is not None:
            compiled = gibibytes(self.compiled)
            text += f" ({self.other.manner} it compiles to {compiled})"
        if self.limit is not None and self.chosen.bytes > self.limit:
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

    def reason(self) -> str:
        """Why the compiled programs do not fit, for people; nothing where they do."""
        if self.needed is None or self.fits:
            return ""
        return str(self.refusal(self.stage, self.needed))

    def instead(self, compiled: int, seconds: float = 0.0) -> TilingDecision | None:
        """The same in the other form, after this one was found to be too large.

        Args:
            compiled: bytes of this form by the compiler.
            seconds: that it took to find out.

        Returns:
            ``None`` where nothing is left: there is no other form, it was tried before,
            or its estimate is larger than what was compiled.
        """
        tried = self.compiled is not None
        if self.other is None or tried or self.other.bytes > compiled:
            return None
        return replace(
            self,
            chosen=self.other,
            other=self.chosen,
            compiled=compiled,
            seconds=seconds,
            needed=None,
        )

    def weighed(self, needed: int | None) -> TilingDecision:
        """The same once its programs are compiled, with bytes of the largest one."""
        return replace(self, needed=needed)

    def refusal(
        self, name: str, needed: int, *, begun: bool = False
    ) -> DoesNotFitError:
        """The error for a program that is too large, with what to do about it.

        Args:
            name: of the stage, or of it and a program.
            needed: bytes that it takes by the compiler.
            begun: whether frames were handed on, so that no other form was tried.
        """
        assert self.limit is not None
        another = "off" if self.tiled else "on"
        then = ""
        if self.compiled is not None and self.other is not None:
            then = (
                f", and {self.other.manner} it compiles to {gibibytes(self.compiled)}"
            )
        advice = "a smaller size, fewer frames or more devices"
        if self.other is not None and self.compiled is None:
            if begun and self.other.bytes <= needed:
                advice = f"--vae-tiling {another}, {advice}"
            else:
                then = (
                    f", and {self.other.manner} it would take about "
                    f"{gibibytes(self.other.bytes)}"
                )
        then += (
            f"; use {advice}, or --vae-tiling {self.setting}, which runs it without "
            "weighing it"
        )
        return DoesNotFitError(name, needed, self.limit, then)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with what people are told."""
        return {
            **asdict(self),
            "tiled": self.tiled,
            "fits": self.fits,
            "line": self.line(),
            "alternative": self.alternative(),
            "reason": self.reason(),
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
