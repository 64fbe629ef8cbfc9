"""Plans of one run on several slices: seconds and cost of a video on each."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuport.cli.shown import plan_text
from tpuport.cli.shown.tables import columns
from tpuport.core.files.run_record import STAGES
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.slices import Topology, parse_topology
from tpuport.core.reports import bytes_text, seconds_text
from tpuport.core.spec.run_settings import read_value
from tpuport.errors import UsageError, quoted

if TYPE_CHECKING:
    from tpuport.core.plan.plan import Plan

_HOUR = 3600.0
_TIME = re.compile(r"(\d+(?:\.\d+)?)(s|m)")


def topologies(text: str, slices: int = 1) -> list[Topology]:
    """The slices of a list such as ``v5e-8,v6e-8``, each once, and so many of each."""
    read = [read_value(parse_topology, name, "--topology") for name in text.split(",")]
    found = [one.times(slices) for one in read]
    return list({one.name: one for one in found}.values())


def prices(texts: Sequence[str], asked: Sequence[Topology]) -> dict[str, float]:
    """What one chip costs for an hour, by generation, of texts such as ``v6e=2.70``."""
    found: dict[str, float] = {}
    for text in ",".join(texts).split(",") if texts else ():
        name, sign, number = (part.strip() for part in text.partition("="))
        try:
            value = float(number)
        except ValueError:
            value = math.nan
        if not sign or not 0 < value < math.inf:
            raise UsageError(
                f"--price {quoted(text)}: give a chip and what it costs for an hour, "
                "such as v6e=2.70"
            )
        if chip(name).name not in {one.chip for one in asked}:
            raise UsageError(f"--price {text}: --topology names no slice of {name}")
        if found.setdefault(name, value) != value:
            raise UsageError(
                f"--price {text}: {name} costs {found[name]:g} too; give one price"
            )
    missing = [one.name for one in asked if one.chip not in found]
    if found and missing:
        name = missing[0]
        raise UsageError(
            f"--price: {name} has no price; add --price {name.partition('-')[0]}=1.20"
        )
    return found


def deadline_of(text: str | None) -> float:
    """Seconds of ``60s`` or ``2m``; no limit without a text."""
    if text is None:
        return math.inf
    found = _TIME.fullmatch(text.strip())
    seconds = float(found[1]) * (60 if found[2] == "m" else 1) if found else 0.0
    if not seconds:
        raise UsageError(f"--deadline {quoted(text)} is no time such as 60s or 2m")
    return seconds


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A slice, and what a video takes there.

    Attributes:
        topology: the slice.
        plan: of the run there.
        videos: that the run makes.
        price: of a chip for an hour; ``None`` where it is not known.
    """

    topology: Topology
    plan: Plan
    videos: int
    price: float | None

    @property
    def seconds(self) -> float | None:
        """Seconds of a video; ``None`` where the run does not fit or is not known."""
        whole = self.plan.seconds
        return whole / self.videos if whole and self.plan.fits else None

    @property
    def cost(self) -> float | None:
        """What a video costs, in the unit of the price."""
        if self.price is None or self.seconds is None:
            return None
        return self.price * self.topology.chips * self.seconds / _HOUR

    def row(self) -> list[str]:
        """Cells for people: name, chips, memory, a step, a video, its cost."""
        plan = self.plan
        used = f"{bytes_text(plan.hbm_bytes)} of "
        used += bytes_text(plan.chip.hbm_usable_bytes)
        verdict = used if plan.fits else f"does not fit: {used}"
        step = plan.seconds_per_step if plan.fits else None
        times = ["-" if s is None else seconds_text(s) for s in (step, self.seconds)]
        cost = "-" if self.cost is None else f"{self.cost:.3g}"
        name, chips = self.topology.title, str(self.topology.chips)
        return [name, chips, verdict, *times, cost]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, the plan with it."""
        return {
            "topology": self.topology.name,
            "chips": self.topology.chips,
            "price_per_chip_hour": self.price,
            "fits": self.plan.fits,
            "seconds_per_video": self.seconds,
            "cost_per_video": self.cost,
            "plan": self.plan.as_dict(),
        }


@dataclass(frozen=True)
class Comparison:
    """Offers in the order asked for.

    Attributes:
        offers: one for each slice.
        deadline: seconds that a video may take.
        stages: of a video, those that are planned.
    """

    offers: Sequence[Offer]
    deadline: float
    stages: Sequence[str]

    @property
    def in_time(self) -> list[Offer]:
        """The offers that meet the deadline, the fastest first."""
        timed = [(one.seconds, one) for one in self.offers if one.seconds is not None]
        met = [pair for pair in timed if pair[0] <= self.deadline]
        return [one for _, one in sorted(met, key=lambda pair: pair[0])]

    @property
    def cheapest(self) -> Offer | None:
        """The cheapest of the offers in time; of equal ones the faster."""
        priced = [(one.cost, one) for one in self.in_time if one.cost is not None]
        return min(priced, key=lambda pair: pair[0], default=(None, None))[1]

    def as_dict(self) -> dict[str, Any]:
        best, fastest = self.cheapest, next(iter(self.in_time), None)
        return {
            "slices": [one.as_dict() for one in self.offers],
            "stages": list(self.stages),
            "deadline": None if self.deadline == math.inf else self.deadline,
            "cheapest": best and best.topology.name,
            "fastest": fastest and fastest.topology.name,
        }

    def text(self, *, verbose: bool) -> str:
        """A line for each slice, and which to take; ``verbose`` adds the plans."""
        whole = len(self.stages) == len(STAGES)
        video = "a video" if whole else " + ".join(self.stages)
        does = "makes a video" if whole else f"does {' and '.join(self.stages)}"
        rows = [["slice", "chips", "HBM of a device", "a step", video, "cost"]]
        rows += [one.row() for one in self.offers]
        within = "" if self.deadline == math.inf else f" within {self.deadline:g} s"
        lines = columns(rows, right=(1, 3, 4, 5))
        if not self.in_time:
            lines += [f"no slice {does}{within}; try --mesh auto or larger slices"]
        else:
            lines += [f"the fastest{within}: {self.in_time[0].topology.title}"]
        if self.cheapest is not None:
            lines += [f"the cheapest{within}: {self.cheapest.topology.title}"]
        if verbose:
            lines += [plan_text.everything(one.plan) for one in self.offers]
        return "\n".join(lines)
