"""Whether a decode is planned in tiles: on plans whose figures are made up."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from tests.core.plan.test_search import GIB, REQUEST, V6E, measured, plan_of
from tests.core.spec.toys import Heard
from tpuport.cli.shown.plan_text import text
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.plan.plan import Plan
from tpuport.core.plan.planner import Planner
from tpuport.core.reports import Reporter
from tpuport.core.spec.tiling import Footprint, decide


class Retried(Planner):
    """A planner whose plan in tiles is known."""

    asked: ClassVar[list[tuple[str, Any]]] = []

    def __post_init__(self) -> None:
        self.say = (self.reporter or Reporter()).say
        self._skeletons, self._tiling = {}, {}
        self.kernels: Any = None
        self.written = []

    def plan(self, spec: MeshSpec, **how: Any) -> Plan:
        with (self.reporter or Reporter()).timed("compiling"):
            self.say("what it finds")
        self.asked.append((self.vae_tiling, how["stages"]))
        small = measured(2.0, 0.1, stage="decode", program="first tile")
        return plan_of(spec, small, tiling={"decode": {}})


@pytest.mark.parametrize(
    ("asked", "gib", "tiled"),
    [("auto", 40.0, True), ("auto", 30.0, False), ("off", 40.0, False)],
)
def test_what_compiles_to_too_much_is_planned_in_tiles(
    asked: str, gib: float, tiled: bool
) -> None:
    nothing: dict[str, Any] = dict.fromkeys(
        ("port", "variant", "checkpoint", "topology", "cache", "ask", "dtype")
    )
    planner = Retried(**nothing, reporter=(heard := Heard()))
    whole, cut = Footprint(bytes=GIB), Footprint(bytes=GIB // 4, tiles="2 x 3 tiles")
    decided = decide("decode", asked, whole, cut, V6E.hbm_usable_bytes)
    planner._tiling["decode"] = decided
    program = measured(gib, 0.1, stage="decode", program="first uint8")
    before = plan_of(MeshSpec(), program, tiling={"decode": decided.as_dict()})
    Retried.asked.clear()
    found = planner._weighed(before, REQUEST)
    assert Retried.asked == ([("on", ["decode"])] if tiled else [])
    # It takes as long as the first one: it is not silent.
    assert heard.lines[1:] == (["compiling ...", "what it finds"] if tiled else [])
    assert [p.program for p in found.programs] == (
        ["first tile"] if tiled else ["first uint8"]
    )
    assert found.fits == (tiled or gib == 30.0)
    assert found.tiling["decode"]["tiled"] is tiled
    assert found.tiling["decode"]["compiled"] == (40 * GIB if tiled else None)
    assert found.tiling["decode"]["fits"] == found.fits
    assert found.tiling["decode"]["needed"] == (2 * GIB if tiled else gib * GIB)


@pytest.mark.parametrize(
    ("asked", "tiles", "words"),
    [
        ("auto", "", "40.00 GiB of a device"),
        ("auto", "2 x 3 tiles", "40.00 GiB of a device"),
        ("on", "2 x 3 tiles", "40.00 GiB of a device"),
    ],
)
def test_a_plan_says_why_no_form_fits(asked: str, tiles: str, words: str) -> None:
    nothing: dict[str, Any] = dict.fromkeys(
        ("port", "variant", "checkpoint", "topology", "cache", "ask", "dtype")
    )
    planner = Retried(**nothing)
    # Tiles that are estimated to take more than what was compiled are not planned.
    cut = Footprint(bytes=50 * GIB, tiles=tiles)
    decided = decide("decode", asked, Footprint(bytes=GIB), cut, V6E.hbm_usable_bytes)
    planner._tiling["decode"] = decided
    program = measured(40.0, 0.1, stage="decode", program="first uint8")
    before = plan_of(MeshSpec(), program, tiling={"decode": decided.as_dict()})
    Retried.asked.clear()
    found = planner._weighed(before, REQUEST)
    assert Retried.asked == []
    made = found.as_dict()["tiling"]["decode"]
    assert (found.fits, made["fits"]) == (False, False)
    assert words in made["reason"]
    (line,) = [x for x in text(found).splitlines() if "compiled: decode" in x]
    assert line.strip() == f"compiled: {made['reason']}"
