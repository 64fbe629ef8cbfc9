"""Whether decode runs in tiles: asked for, or decided by what the compiler says.

With ``auto`` the programs of the whole picture are compiled first. If they take more
than a device has for them, by the compiler's figure or its refusal, the programs of the
tiles are compiled and used. The decision comes before any call of a program. A run,
``compile`` and ``plan`` decide alike; ``Stage.tiles`` says that a stage has the choice.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from typing_extensions import TypedDict

from tpuport.core.enums import Tiling
from tpuport.core.reports import bytes_text
from tpuport.errors import TpuportError


class Tiled(TypedDict):
    """What is read again of how a stage ran, or of how its programs run."""

    tiled: bool


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
            f"{name} needs {bytes_text(needed)} of a device, which has "
            f"{bytes_text(limit)} for it{then}"
        )
        self.name = name
        self.bytes = needed
        self.limit = limit


@dataclass(frozen=True, kw_only=True, slots=True)
class TilingDecision:
    """How a stage runs, and why.

    Attributes:
        stage: its name.
        asked: ``"auto"``, ``"on"`` or ``"off"``.
        tiles: how upstream cuts the picture, in words; empty where the picture is one
            of upstream's tiles, so that both settings are the same.
        tiled: whether it runs in tiles.
        given: whether executables that are there already say how it runs.
        limit: bytes of a device for it; ``None`` where nothing is known.
        needed: bytes of its largest program by the compiler; ``None`` before it is
            compiled, and where the compiler does not tell.
        untiled: bytes of the largest program of the whole picture, where ``auto``
            passed it over.
        seconds: that went into finding this out, compiling included.
    """

    stage: str
    asked: Tiling
    tiles: str = ""
    tiled: bool = False
    given: bool = False
    limit: int | None = None
    needed: int | None = None
    untiled: int | None = None
    seconds: float = 0.0

    @property
    def setting(self) -> Tiling:
        """``"on"`` or ``"off"``, as the stage's plan reads it."""
        return Tiling.ON if self.tiled else Tiling.OFF

    @property
    def form(self) -> str:
        """For people."""
        return f"in {self.tiles}" if self.tiled else "untiled"

    @property
    def fits(self) -> bool:
        """Whether it is within the limit, as far as both are known."""
        return self.limit is None or self.needed is None or self.needed <= self.limit

    @property
    def room(self) -> int | None:
        """What a compiled program may take at most; ``None`` where nothing is weighed.

        With ``on`` and ``off`` it runs whatever it takes.
        """
        return self.limit if self.asked == Tiling.AUTO else None

    def line(self) -> str:
        """How it runs, for people; with bytes of a device where they are known."""
        text = f"{self.stage}: {self.form}"
        if self.asked == Tiling.ON and not self.tiled:
            text += ", as the picture is one of upstream's tiles"
        if self.needed is not None:
            text += f", {bytes_text(self.needed)}"
            if self.limit is not None:
                text += f" of {bytes_text(self.limit)}"
            text += " a device"
        if self.untiled is not None:
            text += f" (untiled {bytes_text(self.untiled)})"
        return text

    def reason(self) -> str:
        """Why the compiled programs do not fit, for people; nothing where they do."""
        return "" if self.fits else str(self.refusal())

    def weighed(self, needed: int | None) -> TilingDecision:
        """The same once its programs are compiled, with bytes of the largest one."""
        return replace(self, needed=needed)

    def instead(self, seconds: float = 0.0) -> TilingDecision | None:
        """The same in tiles, where the whole picture was weighed and does not fit.

        Args:
            seconds: that it took to find out.

        Returns:
            ``None`` where it goes on as it is: it fits, or there are no tiles to take.
        """
        if self.fits or self.room is None:
            return None
        if self.tiled or self.given or not self.tiles:
            return None
        return replace(
            self, tiled=True, untiled=self.needed, needed=None, seconds=seconds
        )

    def passed(self) -> str:
        """Words for people: the decode goes on in tiles, and why."""
        return f"{self._lacks('')}: going on in {self.tiles}"

    def _lacks(self, then: str) -> DoesNotFitError:
        assert self.limit is not None
        assert self.needed is not None
        name = f"{self.stage} {self.form}"
        return DoesNotFitError(name, self.needed, self.limit, then)

    def refusal(self) -> DoesNotFitError:
        """The error for what does not fit, with what to do about it."""
        then = ""
        if self.untiled is not None:
            then = f", and untiled {bytes_text(self.untiled)}"
        then += (
            "; use a smaller size, fewer frames or more devices, or --vae-tiling "
            f"{self.setting}, which runs it without weighing it"
        )
        return self._lacks(then)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, with what people are told."""
        return {
            **asdict(self),
            "fits": self.fits,
            "line": self.line(),
            "reason": self.reason(),
        }
