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
from tests.core.toys import Heard, installed_toy
from tpuport.core import executor as executors
from tpuport.core.chips import chip
from tpuport.core.delivery import Delivery
from tpuport.core.device_memory import (
    host_memory,
    planned_bytes,
    program_room,
    refused_bytes,
)
from tpuport.core.executables import Traced
from tpuport.core.executor import Executor
from tpuport.core.programs import Programs, Ready
from tpuport.core.spec import Call, Program, Stage, StageContext, Work
from tpuport.core.vae_tiling import DoesNotFitError, Footprint, decide
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
    # Only an untiled form that was chosen freely is weighed once it is compiled.
    assert found.room == (limit if asked == "auto" and not tiled else None)


def test_the_words_and_the_json() -> None:
    found = decide("decode", "auto", WHOLE, TILED, 31 * GIB)
    assert found.line() == "decode: about 20.00 GiB of 31.00 GiB a device, untiled"
    assert found.alternative() == (
        "with --vae-tiling on: about 4.00 GiB a device, tiled: 2 x 3 tiles"
    )
    after = found.in_tiles(40 * GIB)
    assert after.line() == (
        "decode: about 4.00 GiB of 31.00 GiB a device, tiled: 2 x 3 tiles (untiled it "
        "compiles to 40.00 GiB)"
    )
    document = after.as_dict()
    assert document["tiled"]
    assert document["compiled"] == 40 * GIB
    assert document["chosen"] == {"bytes": 4 * GIB, "tiles": "2 x 3 tiles"}
    assert document["line"] == after.line()
    full = decide("decode", "auto", WHOLE, TILED, GIB)
    assert full.line().endswith("; that may not fit")


def test_a_size_of_one_tile_is_no_choice() -> None:
    # Tiles of the whole length may be the larger form: they would help nobody.
    larger = Footprint(bytes=WHOLE.bytes + 1, tiles="2 x 2 tiles")
    found = decide("decode", "auto", WHOLE, larger, GIB)
    assert not found.tiled
    assert not found.fits
    found = decide("decode", "on", WHOLE, WHOLE, GIB)
    assert (found.tiled, found.other, found.alternative()) == (False, None, "")
    with pytest.raises(UsageError, match="choose one of auto, on, off"):
        decide("decode", "yes", WHOLE, TILED, None)


# --- what a device has


def device(platform: str, stats: Any = None, kind: str = "") -> Any:
    def memory_stats() -> Any:
        if stats is NotImplementedError:
            raise NotImplementedError("described only")
        return stats

    return SimpleNamespace(
        platform=platform, device_kind=kind, memory_stats=memory_stats
    )


def test_a_device_that_counts_tells() -> None:
    counted = device("tpu", {"bytes_limit": 30 * GIB, "bytes_in_use": 12 * GIB})
    assert program_room([counted], held=10 * GIB, own=2 * GIB) == 20 * GIB


def test_a_chip_that_is_described_is_looked_up() -> None:
    described = device("tpu", NotImplementedError, "TPU v6 lite")
    usable = chip("v6e").hbm_usable_bytes
    assert program_room([described] * 8, held=GIB) == usable - GIB
    assert program_room([device("gpu")]) is None


def test_cpu_devices_share_what_the_machine_has(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable:    4096 kB\n")
    assert host_memory(meminfo, tmp_path) == 4096 * 1024
    (tmp_path / "memory.max").write_text("2000000\n")
    (tmp_path / "memory.current").write_text("500000\n")
    assert host_memory(meminfo, tmp_path) == 1500000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(meminfo, tmp_path) == 4096 * 1024
    assert host_memory(tmp_path / "none", tmp_path / "none") is None


def test_bytes_of_a_compiled_program() -> None:
    import jax
    import jax.numpy as jnp

    def double(x: Any) -> Any:
        return 2 * x

    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    plain = planned_bytes(jax.jit(double).lower(x).compile())
    donated = planned_bytes(jax.jit(double, donate_argnums=0).lower(x).compile())
    assert plain is not None
    assert donated is not None
    assert plain - donated == 4096
    assert planned_bytes(double) is None
    assert refused_bytes("Ran out of memory in memory space hbm. Used 2.00G of 1G") == (
        2 * GIB
    )


# --- a stage that is found to be too large


class Weighed:
    """A compiled program that says what it takes."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.calls = 0

    def __call__(self, *args: Any) -> tuple[Any, Any]:
        self.calls += 1
        frames = np.full((1, 1, 2, 2, 3), 0.25 * self.calls, np.float32)
        return None, {"frames": frames}

    def memory_analysis(self) -> Any:
        return SimpleNamespace(
            argument_size_in_bytes=self.size,
            output_size_in_bytes=0,
            alias_size_in_bytes=0,
            temp_size_in_bytes=0,
            generated_code_size_in_bytes=0,
        )


class Given(Programs):
    """Programs that are there already, or that the compiler refuses."""

    def __init__(self, components: Any, found: dict[str, Any]) -> None:
        super().__init__(components)
        self.found = found

    def get(self, stage: str, name: str, *args: Any) -> Any:
        made = self.found[name]
        if isinstance(made, Exception):
            raise made
        return Ready(call=made, traced=Traced()), None


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    cache = tmp_path_factory.mktemp("cache")
    with installed_toy(), tpuport.load("toy", cache_dir=cache) as session:
        yield session


def stage(seen: list[str]) -> Stage:
    def plan(context: StageContext) -> Work:
        seen.append(context.vae_tiling)
        tiled = context.vae_tiling == "on"
        names = ["tile"] * 3 if tiled else ["first", "next", "next"]
        return Work(
            carry=None,
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
        footprint=lambda context, tiled, devices: TILED if tiled else WHOLE,
    )


def run(
    session: Any, found: dict[str, Any], asked: str, monkeypatch: Any
) -> tuple[Any, list[float], list[str], list[str]]:
    monkeypatch.setattr(executors, "program_room", lambda *args: 30 * GIB)
    heard, seen, given = Heard(), [], []
    executor = Executor(
        session.components,
        keep_loaded=True,
        programs=Given(session.components, found),
        reporter=heard,
        vae_tiling=asked,
    )
    delivery = Delivery("float32", lambda first, x: given.append(float(x.max())))
    request = replace(session.request(prompt="a cat"), num_frames=3)
    _, report = executor.run(stage(seen), request, {}, delivery)
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
        keep_loaded=True,
        programs=Given(session.components, found),
    )
    delivery = Delivery("float32", lambda first, x: given.append(first))
    request = session.request(prompt="a cat")
    with pytest.raises(DoesNotFitError, match=r"decode/late needs 40\.00 GiB"):
        executor.run(odd, request, {}, delivery)
    assert len(given) == 2
