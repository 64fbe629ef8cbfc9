"""Whether a decode is planned in tiles: on plans whose figures are made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.core.plan.test_search import GIB, REQUEST, measured
from tests.core.spec.toys import Heard
from tpuport.cli.shown.plan_text import text
from tpuport.core.enums import Dtype, Tiling
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import parse_topology
from tpuport.core.plan import planner
from tpuport.core.plan.abstract_programs import weighed
from tpuport.core.plan.plan import Plan
from tpuport.core.plan.planner import Planner
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.tiling import TilingDecision


class Made(Planner):
    """A planner whose programs take what is said here."""

    gib: ClassVar[tuple[float, float]]
    tiles: ClassVar[str]

    def __post_init__(self) -> None:
        self.say = self.reporter.say if self.reporter else print
        self.chip, self.devices = chip("v6e"), [None] * 4
        self._tiling, self.written = {}, []

    def check_mesh(self, spec: MeshSpec) -> None:
        pass

    def sharding_plans(self, spec: MeshSpec) -> tuple[Any, ...]:
        return ()

    def _flags(self, stages: Any) -> tuple[str, ...]:
        return ()

    def programs(self, spec: MeshSpec, request: Any, stages: Any) -> Any:
        def form(tiling: TilingDecision) -> Any:
            for name in ("first", "next"):
                gib = self.gib[tiling.tiled]
                name_in_form = f"{name} tile" if tiling.tiled else name
                asked = SimpleNamespace(
                    stage="decode", name=name_in_form, label=f"decode/{name_in_form}"
                )
                yield SimpleNamespace(
                    asked=asked,
                    tiling=tiling,
                    gib=gib if name == "next" else 1.0,
                    needed=None,
                    forget=lambda: None,
                )

        asked = self.settings.vae_tiling
        tiling = TilingDecision(
            stage="decode",
            asked=asked,
            tiles=self.tiles,
            tiled=asked == "on",
            limit=self.chip.hbm_usable_bytes,
        )
        tiling = yield from weighed(tiling, form, self.say)
        self._tiling[tiling.stage] = tiling


def made(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    gib: tuple[float, float],
    asked: str = "auto",
    tiles: str = "2 x 3 tiles",
) -> tuple[Plan, list[str]]:
    """The plan of a decode, whose largest program takes GiB untiled and in tiles."""

    def compiles(program: Any, *where: Any, keep_text: bool) -> Any:
        name = program.asked.name
        return measured(program.gib, 0.1, stage="decode", program=name)

    monkeypatch.setattr(planner, "measure", compiles)
    monkeypatch.setattr(planner, "choices", lambda port: {})
    known: Any = {
        "port": SimpleNamespace(name="m", blocks="native"),
        "variant": SimpleNamespace(name="v"),
        "checkpoint": SimpleNamespace(source="w"),
        "topology": parse_topology("v6e-4"),
        "ask": None,
    }
    heard = Heard()
    settings = RunSettings(dtype=Dtype.BFLOAT16, vae_tiling=Tiling(asked))
    asker = Made(**known, cache=tmp_path, settings=settings, reporter=heard)
    monkeypatch.setattr(Made, "gib", gib, raising=False)
    monkeypatch.setattr(Made, "tiles", tiles, raising=False)
    return asker.plan(MeshSpec(dp=4), request=REQUEST, stages=["decode"]), heard.lines


@pytest.mark.parametrize(
    ("asked", "gib", "tiled"),
    [("auto", 40.0, True), ("auto", 30.0, False), ("off", 40.0, False)],
)
def test_what_compiles_to_too_much_is_planned_in_tiles(
    asked: str,
    gib: float,
    tiled: bool,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    found, said = made(monkeypatch, tmp_path, (gib, 2.0), asked)
    names = ["first tile", "next tile"] if tiled else ["first", "next"]
    assert [p.program for p in found.programs] == names
    assert found.fits == (tiled or gib == 30.0)
    told = found.tiling["decode"]
    assert (told["tiled"], told["fits"]) == (tiled, found.fits)
    assert told["untiled"] == (40 * GIB if tiled else None)
    assert told["needed"] == (2 * GIB if tiled else gib * GIB)
    why = [line for line in said if line.endswith("going on in 2 x 3 tiles")]
    assert len(why) == tiled


@pytest.mark.parametrize(
    ("asked", "tiles", "words"),
    [
        ("auto", "", "decode untiled needs 40.00 GiB of a device"),
        ("auto", "2 x 3 tiles", "for it, and untiled 40.00 GiB; use a smaller size"),
        ("on", "2 x 3 tiles", "decode in 2 x 3 tiles needs 50.00 GiB of a device"),
    ],
)
def test_a_plan_says_why_no_form_fits(
    asked: str,
    tiles: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    found, _ = made(monkeypatch, tmp_path, (40.0, 50.0), asked, tiles)
    told = found.as_dict()["tiling"]["decode"]
    assert (found.fits, told["fits"]) == (False, False)
    assert words in told["reason"]
    # With all programs of the form that was tried last.
    assert len(found.programs) == 2
    (line,) = [x for x in text(found).splitlines() if " of a device, which" in x]
    assert line.strip() == told["reason"]
