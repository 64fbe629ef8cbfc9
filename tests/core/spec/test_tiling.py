"""Whether decode is tiled: asked for, or decided by what the compiler says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import tpuport
from tests.core.spec.toys import Heard, installed_toy
from tpuport.core.enums import StageName, Tiling
from tpuport.core.programs.lowering import Traced
from tpuport.core.programs.program_store import Programs, Ready
from tpuport.core.reports import CompileReport
from tpuport.core.run import executor as executors
from tpuport.core.run.executor import Executor
from tpuport.core.run.frame_delivery import Delivery
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, StageContext, Work
from tpuport.core.spec.tiling import DoesNotFitError, TilingDecision

GIB = 2**30
TILES = "2 x 3 tiles"


def decision(asked: str = "auto", **how: Any) -> TilingDecision:
    how = {"tiles": TILES, "limit": 30 * GIB, **how}
    return TilingDecision(stage="decode", asked=asked, **how)


@pytest.mark.parametrize(
    ("how", "tiled"),
    [
        ({"needed": 31 * GIB}, True),
        ({"needed": 30 * GIB}, False),
        ({"needed": None}, False),
        ({"needed": 31 * GIB, "limit": None}, False),
        ({"needed": 31 * GIB, "asked": "off"}, False),
        # A picture that is one of upstream's tiles has no other form.
        ({"needed": 31 * GIB, "tiles": ""}, False),
        # Nor has one whose programs are there.
        ({"needed": 31 * GIB, "given": True}, False),
        # Tiles are the last form.
        ({"needed": 31 * GIB, "tiled": True}, False),
    ],
)
def test_what_goes_on_in_tiles(how: dict[str, Any], tiled: bool) -> None:
    found = decision(**how).instead(3.0)
    assert (found is not None) is tiled
    if found is not None:
        assert (found.setting, found.untiled, found.seconds) == ("on", 31 * GIB, 3.0)
        assert found.needed is None


def test_the_words_and_the_json() -> None:
    found = decision().weighed(20 * GIB)
    assert found.line() == "decode: untiled, 20.00 GiB of 30.00 GiB a device"
    assert (found.fits, found.reason()) == (True, "")
    found = decision().weighed(40 * GIB)
    assert found.passed() == (
        "decode untiled needs 40.00 GiB of a device, which has 30.00 GiB for it: going "
        "on in 2 x 3 tiles"
    )
    after = found.instead()
    assert after is not None
    after = after.weighed(4 * GIB)
    assert after.line() == (
        "decode: in 2 x 3 tiles, 4.00 GiB of 30.00 GiB a device (untiled 40.00 GiB)"
    )
    document = after.as_dict()
    assert (document["tiled"], document["fits"]) == (True, True)
    assert (document["needed"], document["untiled"]) == (4 * GIB, 40 * GIB)
    assert document["line"] == after.line()
    full = after.weighed(35 * GIB)
    assert full.as_dict()["reason"] == full.reason() == str(full.refusal())
    assert full.reason() == (
        "decode in 2 x 3 tiles needs 35.00 GiB of a device, which has 30.00 GiB for "
        "it, and untiled 40.00 GiB; use a smaller size, fewer frames or more devices, "
        "or --vae-tiling on, which runs it without weighing it"
    )
    assert decision("off").line() == "decode: untiled"
    assert decision("on", tiles="").line() == (
        "decode: untiled, as the picture is one of upstream's tiles"
    )


# --- a stage that is found to be too large


class Sized:
    """A compiled program that says what it takes, and hands its carry on."""

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.calls = 0

    def __call__(self, weights: Any, carry: Any, *args: Any) -> tuple[Any, Any]:
        self.calls += 1
        frames = np.full((1, 1, 2, 2, 3), 0.25 * self.calls, np.float32)
        return carry, {"frames": frames}

    @property
    def out_info(self) -> Any:
        return None, {"frames": jax.ShapeDtypeStruct((1, 1, 2, 2, 3), np.float32)}

    def memory_analysis(self) -> Any:
        if self.size is None:
            return None
        return SimpleNamespace(
            argument_size_in_bytes=self.size,
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
            temp_size_in_bytes=0,
            generated_code_size_in_bytes=0,
        )


class Given(Programs):
    """Programs that are there already, or that the compiler refuses."""

    def __init__(self, components: Any, found: dict[str, Any], **how: Any) -> None:
        super().__init__(components, **how)
        self.found = found
        self.asked: list[str] = []

    def get(self, asked: Any, request: Any) -> Any:
        stage, name = asked.stage, asked.name
        if name in self._ready:
            return self._ready[name], None
        # Compiled the first time it is asked for.
        self.asked.append(name)
        made = self.found[name]
        if isinstance(made, Exception):
            raise made
        self._ready[name] = Ready(call=made, traced=Traced())
        report = CompileReport(
            stage=stage, program=name, trace_seconds=1, compile_seconds=2, cached=False
        )
        return self._ready[name], report


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    cache = tmp_path_factory.mktemp("cache")
    with installed_toy(), tpuport.load("toy", cache_dir=cache) as session:
        yield session


def stage(seen: list[str], tiles: str = TILES) -> Stage:
    def plan(context: StageContext) -> Work:
        seen.append(context.vae_tiling)
        tiled = tiles and context.vae_tiling == "on"
        names = ["tile"] * 3 if tiled else ["first", "next", "next"]
        return Work(
            carry=None,
            constants=None,
            calls=(Call(name, {"t": np.float32(0)}) for name in names),
            total=3,
            to_frames=lambda index, output: output["frames"],
        )

    fn = Program(component="transformer", fn=lambda *args: pytest.fail("not called"))
    return Stage(
        name="decode",
        unit="chunk",
        components=("transformer",),
        programs=dict.fromkeys(("first", "next", "tile"), fn),
        plan=plan,
        upstream=lambda context: {"frames": np.zeros((1, 3, 2, 2, 3), np.float32)},
        writes=(),
        tiles=lambda context: tiles,
    )


class Ran:
    """One run of a stage, with 30 GiB for it."""

    def __init__(
        self,
        session: Any,
        found: dict[str, Any],
        asked: str = "auto",
        tiles: str = TILES,
        inspection: RunSettings | None = None,
        backend: str = "tpuport",
        programs: Given | None = None,
        **how: Any,
    ) -> None:
        heard = Heard()
        self.said, self.seen = heard.lines, list[str]()
        self.given: list[float] = []
        self.programs = programs or Given(session.components, found, **how)
        executor = Executor(
            session.components,
            replace(inspection or RunSettings(), vae_tiling=Tiling(asked)),
            programs=self.programs,
            reporter=heard,
        )
        delivery = Delivery("float32", lambda first, x: self.given.append(x.max()))
        request = replace(session.request(prompt="a cat"), num_frames=3)
        made = stage(self.seen, tiles)
        if backend == "tpuport":
            _, self.report = executor.run(made, request, {}, delivery)
        else:
            _, self.report = executor.run_upstream(made, request, {}, "cpu", delivery)

    @property
    def tiling(self) -> dict[str, Any]:
        assert self.report.tiling is not None
        return self.report.tiling


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "program_room", lambda *args: 30 * GIB)


REFUSED = RuntimeError(
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.00G of 31.25G"
)


def too_large() -> Sized:
    return Sized(40 * GIB)


@pytest.mark.parametrize(
    ("first", "following"),
    [
        (too_large(), Sized(1)),
        (Sized(1), too_large()),
        (REFUSED, Sized(1)),
        (Sized(1), REFUSED),
    ],
    ids=["first", "second", "first-refused", "second-refused"],
)
def test_what_compiles_to_too_much_is_run_in_tiles(
    first: Any, following: Any, session: Any, tmp_path: Path
) -> None:
    found = {"first": first, "next": following, "tile": Sized(GIB)}
    looked = RunSettings(memory_report=True, profile=tmp_path)
    ran = Ran(session, found, inspection=looked)
    # Nothing of the whole picture was called.
    assert ran.given == [0.25, 0.5, 0.75]
    assert not any(x.calls for x in (first, following) if isinstance(x, Sized))
    assert (ran.tiling["tiled"], ran.tiling["fits"]) == (True, True)
    assert (ran.tiling["untiled"], ran.tiling["needed"]) == (40 * GIB, GIB)
    assert 0 < ran.tiling["seconds"] < ran.report.total_seconds
    (why,) = [line for line in ran.said if line.endswith("going on in 2 x 3 tiles")]
    assert why.startswith("decode untiled needs 40.00 GiB of a device, which has 30.00")
    assert ran.tiling["line"] in ran.said
    # What was passed over leaves nothing else in the report.
    assert [c.program for c in ran.report.compiles] == ["tile"]
    assert [c["program"] for c in ran.report.memory] == ["tile"] * 3
    assert ran.report.steady_calls == 2
    assert ran.report.profile is not None
    assert ran.report.profile["calls"] == 2


@pytest.mark.parametrize("size", [30 * GIB, None], ids=["fits", "untold"])
def test_what_fits_runs_untiled(size: int | None, session: Any) -> None:
    found = {"first": Sized(size), "next": Sized(size), "tile": too_large()}
    ran = Ran(session, found)
    assert ran.given == [0.25, 0.25, 0.5]
    assert (ran.tiling["tiled"], ran.tiling["needed"]) == (False, size)
    # Both are compiled before the first call; the first call of each is no steady one.
    assert [c.program for c in ran.report.compiles] == ["first", "next"]
    assert ran.report.steady_calls == 1


@pytest.mark.parametrize(
    ("tiles", "words"),
    [
        (
            TILES,
            "decode in 2 x 3 tiles needs 35.00 GiB of a device, which has 30.00 GiB "
            "for it, and untiled 40.00 GiB; use a smaller size, fewer frames or more "
            "devices, or --vae-tiling on,",
        ),
        (
            "",
            "decode untiled needs 40.00 GiB of a device, which has 30.00 GiB for it; "
            "use a smaller size, fewer frames or more devices, or --vae-tiling off,",
        ),
    ],
    ids=["tiles", "one tile"],
)
def test_what_fits_in_no_form_is_not_called(
    tiles: str, words: str, session: Any
) -> None:
    large, cut = too_large(), Sized(35 * GIB)
    found = {"first": large, "next": large, "tile": cut}
    with pytest.raises(DoesNotFitError) as caught:
        Ran(session, found, tiles=tiles)
    assert str(caught.value).startswith(words)
    assert caught.value.limit == 30 * GIB
    assert (large.calls, cut.calls) == (0, 0)
    # Those who say so themselves may try.
    for setting in ("on", "off"):
        ran = Ran(session, found, setting, tiles)
        assert ran.tiling["asked"] == setting
        assert ran.tiling["tiled"] is (setting == "on" and tiles != "")
        assert not ran.tiling["fits"]
    assert large.calls + cut.calls == 6
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        Ran(session, {**found, "first": REFUSED}, "off")


@pytest.mark.parametrize("following", [REFUSED, too_large()], ids=["refused", "large"])
def test_what_is_too_large_is_not_compiled_again(
    following: Any,
    session: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = {"first": Sized(1), "next": following, "tile": Sized(1)}
    first = Ran(session, found, cache=tmp_path)
    assert first.programs.asked == ["first", "next", "tile"]
    other = Ran(session, found, cache=tmp_path)
    assert other.programs.asked == ["first", "tile"]
    assert other.tiling["untiled"] == 40 * GIB
    # Nor in the same session, where nothing is kept.
    alone = Ran(session, found).programs
    assert Ran(session, found, programs=alone).tiling["tiled"]
    assert alone.asked == ["first", "next", "tile"]
    # With more room it is.
    monkeypatch.setattr(executors, "program_room", lambda *args: 50 * GIB)
    assert "next" in Ran(session, found, cache=tmp_path).programs.asked


def test_where_nothing_is_compiled_auto_is_untiled(session: Any) -> None:
    ran = Ran(session, {}, backend="diffusers")
    assert (ran.tiling["tiled"], ran.tiling["needed"]) == (False, None)
    assert not [line for line in ran.said if line.startswith("decode: ")]
    ran = Ran(session, {}, "on", backend="diffusers")
    assert "decode: in 2 x 3 tiles" in ran.said
    executor = Executor(session.components, RunSettings(no_jit=(StageName.DECODE,)))
    tiling = executor.tiling(stage([]), session.request(prompt="a cat"))
    assert tiling is not None
    assert (tiling.tiled, tiling.room) == (False, None)


def test_a_plan_leaves_out_what_others_hold(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def room(devices: Any, held: int = 0, own: int = 0) -> int:
        asked.append((held, own))
        return 30 * GIB - held

    monkeypatch.setattr(executors, "program_room", room)
    monkeypatch.setattr(
        session.components, "held_bytes", lambda names: (12 * GIB, 3 * GIB)
    )
    executor = Executor(session.components, RunSettings())
    request = session.request(prompt="a cat")
    beside = executor.tiling(stage([]), request)
    alone = executor.tiling(stage([]), request, alone=True)
    assert asked == [(12 * GIB, 3 * GIB), (0, 3 * GIB)]
    assert beside is not None
    assert alone is not None
    assert (beside.limit, alone.limit) == (18 * GIB, 30 * GIB)
