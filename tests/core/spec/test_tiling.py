"""Whether decode is tiled: decided from an estimate, and again from the compiler."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import tpuport
from tests.core.spec.toys import Heard, installed_toy
from tpuport.core.enums import Tiling
from tpuport.core.programs.executable_files import Traced
from tpuport.core.programs.program_store import Programs, Ready
from tpuport.core.reports import CompileReport
from tpuport.core.run import executor as executors
from tpuport.core.run.executor import Executor
from tpuport.core.run.frame_delivery import Delivery
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, StageContext, Work
from tpuport.core.spec.tiling import DoesNotFitError, Footprint, decide
from tpuport.errors import UsageError

GIB = 2**30
WHOLE, TILED = Footprint(bytes=20 * GIB), Footprint(bytes=4 * GIB, tiles="2 x 3 tiles")


@pytest.mark.parametrize(
    ("asked", "limit", "tiled"),
    [
        ("auto", 30 * GIB, False),
        ("auto", 10 * GIB, True),
        ("auto", 1 * GIB, True),
        ("auto", None, False),
        ("on", 30 * GIB, True),
        ("off", 1 * GIB, False),
    ],
)
def test_what_is_chosen(asked: str, limit: int | None, tiled: bool) -> None:
    found = decide("decode", asked, WHOLE, TILED, limit)
    assert found.tiled is tiled
    assert found.other == (WHOLE if tiled else TILED)
    assert found.fits == (limit is None or found.chosen.bytes <= limit)
    # What was chosen freely is weighed once it is compiled, in either form.
    assert found.room == (limit if asked == "auto" else None)


def test_the_words_and_the_json() -> None:
    found = decide("decode", "auto", WHOLE, TILED, 31 * GIB)
    assert found.line() == "decode: about 20.00 GiB of 31.00 GiB a device, untiled"
    assert found.alternative() == (
        "with --vae-tiling on: about 4.00 GiB a device, tiled: 2 x 3 tiles"
    )
    after = found.instead(40 * GIB, seconds=3.0)
    assert after is not None
    assert after.line() == (
        "decode: about 4.00 GiB of 31.00 GiB a device, tiled: 2 x 3 tiles (untiled it "
        "compiles to 40.00 GiB)"
    )
    document = after.as_dict()
    assert document["tiled"]
    assert (document["compiled"], document["seconds"]) == (40 * GIB, 3.0)
    assert document["chosen"] == {"bytes": 4 * GIB, "tiles": "2 x 3 tiles"}
    assert document["line"] == after.line()
    full = decide("decode", "auto", WHOLE, TILED, GIB)
    assert full.line().endswith("; that may not fit")


def test_the_compilers_figure_decides_what_fits() -> None:
    found = decide("decode", "auto", WHOLE, TILED, 10 * GIB)
    assert (found.fits, found.reason()) == (True, "")
    found = found.weighed(11 * GIB)
    assert not found.fits
    assert found.as_dict()["reason"] == found.reason()
    assert found.reason() == (
        "decode needs 11.00 GiB of a device, which has 10.00 GiB for it, and untiled "
        "it would take about 20.00 GiB; use a smaller size, fewer frames or more "
        "devices, or --vae-tiling on, which runs it without weighing it"
    )
    # An estimate errs on the high side: alone it says "may" and refuses nothing.
    small = decide("decode", "auto", WHOLE, WHOLE, 19 * GIB)
    assert (small.fits, small.reason()) == (False, "")
    assert small.weighed(12 * GIB).fits


def test_another_form_is_for_what_may_be_less() -> None:
    found = decide("decode", "auto", WHOLE, TILED, 3 * GIB)
    # In tiles it was compiled to less than the estimate of the whole picture.
    assert found.instead(19 * GIB) is None
    whole = found.instead(21 * GIB)
    assert whole is not None
    assert (whole.setting, whole.compiled) == ("off", 21 * GIB)
    # Each form is tried once.
    assert whole.instead(99 * GIB) is None
    assert decide("decode", "auto", WHOLE, WHOLE, GIB).instead(99 * GIB) is None


def test_a_size_of_one_tile_is_no_choice() -> None:
    # Tiles of the whole length may be the larger form: they would help nobody.
    larger = Footprint(bytes=WHOLE.bytes + 1, tiles="2 x 2 tiles")
    found = decide("decode", "auto", WHOLE, larger, GIB)
    assert not found.tiled
    assert not found.fits
    found = decide("decode", "on", WHOLE, WHOLE, GIB)
    assert (found.tiled, found.other, found.alternative()) == (False, None, "")
    assert found.line() == (
        "decode: about 20.00 GiB of 1.00 GiB a device, untiled, as the picture is one "
        "of upstream's tiles; that may not fit"
    )
    for asked in ("off", "auto"):
        found = decide("decode", asked, WHOLE, WHOLE, None)
        assert found.line().endswith("a device, untiled")
    with pytest.raises(UsageError, match="choose one of auto, on, off"):
        decide("decode", "yes", WHOLE, TILED, None)


# --- a stage that is found to be too large


class Weighed:
    """A compiled program that says what it takes, and hands its carry on."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = 0

    def __call__(self, weights: Any, carry: Any, *args: Any) -> tuple[Any, Any]:
        self.calls += 1
        frames = np.full((1, 1, 2, 2, 3), 0.25 * self.calls, np.float32)
        return carry, {"frames": frames}

    def memory_analysis(self) -> Any:
        return SimpleNamespace(
            argument_size_in_bytes=self.size,
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
            temp_size_in_bytes=0,
            generated_code_size_in_bytes=0,
        )


class Events(Heard):
    """Keeps the beginnings of a stage too."""

    def stage_started(self, stage: str, total: int, unit: str) -> None:
        self.lines.append(f"started {stage} {total} {unit}")

    def stage_restarted(self, stage: str, total: int, unit: str) -> None:
        self.lines.append(f"restarted {stage} {total} {unit}")


def report_of(stage: str, name: str) -> CompileReport:
    return CompileReport(
        stage=stage, program=name, trace_seconds=1, compile_seconds=2, cached=False
    )


class Given(Programs):
    """Programs that are there already, or that the compiler refuses."""

    def __init__(self, components: Any, found: dict[str, Any]) -> None:
        super().__init__(components)
        self.found = found
        self.readies: dict[str, Ready] = {}
        self.asked: set[str] = set()

    def is_ready(self, stage: str, name: str, args: Any) -> bool:
        return name in self.asked

    def get(self, stage: str, name: str, *args: Any) -> Any:
        made = self.found[name]
        if isinstance(made, Exception):
            raise made
        # Compiled the first time it is asked for.
        ready = self.readies.setdefault(name, Ready(call=made, traced=Traced()))
        known, self.asked = name in self.asked, {*self.asked, name}
        return ready, None if known else report_of(stage, name)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    cache = tmp_path_factory.mktemp("cache")
    with installed_toy(), tpuport.load("toy", cache_dir=cache) as session:
        yield session


def stage(
    seen: list[str],
    whole: Footprint = WHOLE,
    tiles: Footprint = TILED,
    carry: Any = None,
) -> Stage:
    def plan(context: StageContext) -> Work:
        seen.append(context.vae_tiling)
        tiled = context.vae_tiling == "on"
        names = ["tile"] * 3 if tiled else ["first", "next", "next"]
        return Work(
            carry=carry,
            constants=None,
            calls=[Call(name, {"t": np.float32(0)}) for name in names],
            total=3,
            frames=lambda index, output: output["frames"],
        )

    fn = Program(component="transformer", fn=lambda *args: pytest.fail("not called"))
    return Stage(
        name="decode",
        unit="chunk",
        components=("transformer",),
        programs=dict.fromkeys(("first", "next", "tile"), fn),
        plan=plan,
        upstream=lambda context: pytest.fail("not called"),
        writes=(),
        footprint=lambda context, tiled, devices: tiles if tiled else whole,
    )


def run(
    session: Any,
    found: dict[str, Any],
    asked: str,
    monkeypatch: Any,
    inspection: RunSettings | None = None,
    **how: Any,
) -> tuple[Any, list[float], list[str], list[str]]:
    monkeypatch.setattr(executors, "program_room", lambda *args: 30 * GIB)
    heard, seen, given = Events(), [], []
    executor = Executor(
        session.components,
        replace(inspection or RunSettings(), vae_tiling=Tiling(asked)),
        programs=Given(session.components, found),
        reporter=heard,
    )
    delivery = Delivery("float32", lambda first, x: given.append(float(x.max())))
    request = replace(session.request(prompt="a cat"), num_frames=3)
    _, report = executor.run(stage(seen, **how), request, {}, delivery)
    return report, given, seen, heard.lines


TOO_LARGE = Weighed(40 * GIB)
REFUSED = RuntimeError(
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.00G of 31.25G"
)


@pytest.mark.parametrize(
    ("first", "following"),
    [
        (TOO_LARGE, Weighed(1)),
        (Weighed(1), TOO_LARGE),
        (REFUSED, Weighed(1)),
        (Weighed(1), REFUSED),
    ],
    ids=["first", "second", "first-refused", "second-refused"],
)
def test_what_compiles_to_too_much_is_run_in_tiles(
    first: Any, following: Any, session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"first": first, "next": following, "tile": Weighed(GIB)}
    TOO_LARGE.calls = 0
    report, given, seen, said = run(session, found, "auto", monkeypatch)
    assert seen == ["off", "on"]
    # No frame of the first attempt was handed on, and nothing too large was called.
    assert given == [0.25, 0.5, 0.75]
    assert TOO_LARGE.calls == 0
    assert report.tiling["tiled"]
    assert report.tiling["compiled"] == 40 * GIB
    assert any("going on in tiles" in line for line in said)
    assert any("untiled it compiles to 40.00 GiB" in line for line in said)
    # What it goes on to do is not given as advice.
    assert not any("use " in line for line in said)
    assert (report.tiling["needed"], report.tiling["fits"]) == (GIB, True)


@pytest.mark.parametrize("first", [REFUSED, Weighed(1)], ids=["first", "second"])
def test_what_was_given_up_leaves_nothing_in_the_report(
    first: Any, session: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = {"first": first, "next": TOO_LARGE, "tile": Weighed(GIB)}
    looked = RunSettings(memory_report=True, profile=tmp_path)
    report, _, _, said = run(session, found, "auto", monkeypatch, looked)
    started = [line for line in said if "started decode" in line]
    assert started == ["started decode 3 chunk", "restarted decode 3 chunk"]
    assert [(c["call"], c["program"]) for c in report.memory] == [
        (0, "tile"),
        (1, "tile"),
        (2, "tile"),
    ]
    assert [c.program for c in report.compiles] == ["tile"]
    assert report.steady_calls == 2
    assert report.profile["calls"] == 2
    assert 0 < report.tiling["seconds"] < report.total_seconds


def test_what_was_given_up_is_freed_first(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax

    shape = (7, 11, 13)

    class Counts(Weighed):
        def __call__(self, *args: Any) -> Any:
            held.append(sum(x.shape == shape for x in jax.live_arrays()))
            return super().__call__(*args)

    held: list[int] = []
    found = {"first": Weighed(1), "next": TOO_LARGE, "tile": Counts(GIB)}
    run(session, found, "auto", monkeypatch, carry=np.zeros(shape, np.float32))
    # Only that of the run in tiles.
    assert held == [1, 1, 1]


def size(gib: int, tiles: str = "") -> Footprint:
    return Footprint(bytes=gib * GIB, tiles=tiles)


@pytest.mark.parametrize(
    ("whole", "tiles", "compiled", "words"),
    [
        (
            WHOLE,
            TILED,
            (40, 35),
            "decode/tile needs 35.00 GiB of a device, which has 30.00 GiB for it, and "
            "untiled it compiles to 40.00 GiB; use a smaller size, fewer frames or "
            "more devices, or --vae-tiling on,",
        ),
        (size(50), size(45, "2 x 2 tiles"), (99, 45), "decode/tile needs 45.00 GiB"),
        (
            size(20),
            size(45, "2 x 2 tiles"),
            (40, 1),
            "decode/first needs 40.00 GiB of a device, which has 30.00 GiB for it, and "
            "in tiles it would take about 45.00 GiB; use a smaller size, fewer frames "
            "or more devices, or --vae-tiling off,",
        ),
        (
            size(20),
            size(20),
            (40, 1),
            "decode/first needs 40.00 GiB of a device, which has 30.00 GiB for it; use "
            "a smaller size",
        ),
    ],
    ids=["both-compile", "both-estimates", "larger-tiles", "one-tile"],
)
def test_what_fits_in_no_form_is_not_called(
    whole: Footprint,
    tiles: Footprint,
    compiled: tuple[int, int],
    words: str,
    session: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large, cut = (Weighed(n * GIB) for n in compiled)
    found = {"first": large, "next": large, "tile": cut}
    with pytest.raises(DoesNotFitError) as caught:
        run(session, found, "auto", monkeypatch, whole=whole, tiles=tiles)
    assert str(caught.value).startswith(words)
    assert caught.value.limit == 30 * GIB
    assert (large.calls, cut.calls) == (0, 0)
    # Those who say so themselves may try.
    for setting in ("on", "off"):
        run(session, found, setting, monkeypatch, whole=whole, tiles=tiles)
    assert large.calls + cut.calls == 6


def test_an_estimate_alone_refuses_nothing(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Weighed(29 * GIB)
    found = {"first": TOO_LARGE, "next": TOO_LARGE, "tile": cut}
    whole, tiles = size(50), size(45, "2 x 2 tiles")
    report, _, _, said = run(
        session, found, "auto", monkeypatch, whole=whole, tiles=tiles
    )
    assert cut.calls == 3
    assert any(line.endswith("; that may not fit") for line in said)
    assert report.tiling["fits"]


def test_tiles_that_compile_to_more_than_the_whole_are_left(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The estimate of the whole picture was too high, that of the tiles too low.
    cut = Weighed(60 * GIB)
    found = {"first": Weighed(20 * GIB), "next": Weighed(GIB), "tile": cut}
    report, given, seen, said = run(
        session, found, "auto", monkeypatch, whole=size(40), tiles=TILED
    )
    assert (seen, cut.calls, len(given)) == (["on", "off"], 0, 3)
    assert any(line.endswith("going on untiled") for line in said)
    assert report.tiling["compiled"] == 60 * GIB
    assert (report.tiling["tiled"], report.tiling["fits"]) == (False, True)


def test_what_fits_runs_untiled(session: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"first": Weighed(GIB), "next": Weighed(29 * GIB), "tile": TOO_LARGE}
    report, given, seen, _ = run(session, found, "auto", monkeypatch)
    assert seen == ["off"]
    assert given == [0.25, 0.25, 0.5]
    assert not report.tiling["tiled"]


def test_off_runs_whatever_it_takes(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"first": Weighed(99 * GIB), "next": Weighed(GIB), "tile": TOO_LARGE}
    report, given, _, _ = run(session, found, "off", monkeypatch)
    assert (report.tiling["asked"], report.tiling["tiled"]) == ("off", False)
    assert given == [0.25, 0.25, 0.5]
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        run(session, {**found, "first": REFUSED}, "off", monkeypatch)


def test_frames_that_were_given_are_not_taken_back(
    session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executors, "program_room", lambda *args: 30 * GIB)
    given: list[int] = []
    names = ["first", "next", "late"]
    made = stage([])
    work = Work(
        carry=None,
        constants=None,
        calls=[Call(name, {"t": np.float32(0)}) for name in names],
        total=3,
        frames=lambda index, output: output["frames"],
    )
    programs = {**made.programs, "late": made.programs["next"]}
    odd = replace(made, programs=programs, plan=lambda context: work)
    found = {"first": Weighed(1), "next": Weighed(1), "late": TOO_LARGE}
    executor = Executor(
        session.components,
        RunSettings(),
        programs=Given(session.components, found),
    )
    delivery = Delivery("float32", lambda first, x: given.append(first))
    request = session.request(prompt="a cat")
    with pytest.raises(
        DoesNotFitError, match=r"decode/late needs 40\.00 GiB.*; use --vae-tiling on, "
    ):
        executor.run(odd, request, {}, delivery)
    assert len(given) == 2


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
    # 20 GiB do not fit beside 12 of 30.
    assert (beside.tiled, alone.tiled) == (True, False)
