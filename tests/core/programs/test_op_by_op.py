"""Without jit: the same numbers, and each op can be looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import tpuport
from tests.core.spec.toys import Heard, installed_toy
from tests.tolerances import TOLERANCES
from tpuport.core.enums import StageName
from tpuport.core.run.executor import Executor
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, Work
from tpuport.errors import UsageError

STAGES = ("encode", "denoise", "decode")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with installed_toy():
        yield tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("mesh", ["dp=1,sp=1,tp=1", "dp=1,sp=2,tp=2"])
def test_every_stage_gives_what_its_programs_give(mesh: str, cache: Path) -> None:
    with tpuport.load("toy", cache_dir=cache, mesh=mesh) as session:
        compiled = session.generate("a cat", seed=3)
    heard = Heard()
    with tpuport.load(
        "toy", cache_dir=cache, mesh=mesh, no_jit=STAGES, reporter=heard
    ) as session:
        eager = session.generate("a cat", seed=3)
    scale = float(np.abs(compiled.latents.numpy()).max())
    assert np.abs(eager.frames - compiled.frames).max() <= TOLERANCES["video float32"]
    assert (eager.latents - compiled.latents).abs().max() <= (
        TOLERANCES["video float32"] * max(scale, 1)
    )
    assert heard.about("compiling") == []
    assert [line.split()[0] for line in heard.about("runs op by op")] == list(STAGES)
    for ours, theirs in zip(eager.report.stages, compiled.report.stages, strict=True):
        assert (ours.op_by_op, theirs.op_by_op) == (True, False)
        assert ours.compiles == ()
        # What ran is told as ever.
        assert ours.attention == theirs.attention
        assert ours.patches == theirs.patches
    assert dict(eager.report.summary())["compiled"] == "nothing"


def test_the_other_stages_are_compiled(cache: Path) -> None:
    heard = Heard()
    with tpuport.load(
        "toy", cache_dir=cache, compile_cache=False, no_jit=["denoise"], reporter=heard
    ) as session:
        report = session.generate("a cat").report
    assert [s.op_by_op for s in report.stages] == [False, True, False]
    assert heard.about("compiling") == ["compiling encode/run", "compiling decode/run"]
    with pytest.raises(UsageError, match="'denose' is none of encode"):
        tpuport.load("toy", cache_dir=cache, no_jit=["denose"])
    with tpuport.load("toy", cache_dir=cache, no_jit="denoise") as session:
        assert session.settings.no_jit == ("denoise",)


def run(
    session: Any, fn: Callable[..., Any], *, no_jit: bool, values: Any = (1.0, 2.0)
) -> np.ndarray:
    """A stage that calls one program on each value, on a carry that starts at 0."""
    stage = Stage(
        name="denoise",
        unit="step",
        components=("transformer",),
        programs={"step": Program(component="transformer", fn=fn)},
        plan=lambda context: Work(
            carry=np.zeros(8, np.float32),
            constants=None,
            calls=[Call("step", {"x": np.float32(x)}) for x in values],
            total=len(values),
            finish=lambda carry, outputs: {"latents": np.asarray(carry)},
        ),
        upstream=lambda context: {},
        writes=(),
    )
    executor = Executor(
        session.components,
        RunSettings(no_jit=(StageName.DENOISE,) if no_jit else ()),
    )
    made, _ = executor.run(stage, session.request(prompt="a cat"), {})
    return made["latents"]


def test_a_program_shows_its_numbers(cache: Path) -> None:
    seen: list[float] = []

    def step(model: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        def turn(total: Any, x: Any) -> Any:
            seen.append(float(total.sum()))
            return total + x * inputs["x"], None

        return jax.lax.scan(turn, carry, jnp.arange(3.0))[0], None

    with tpuport.load("toy", cache_dir=cache) as session:
        made = run(session, step, no_jit=True)
        # Every turn of every call, with the values that it had.
        assert seen == [0, 0, 8, 24, 24, 40]
        assert made.tolist() == [9.0] * 8
        with pytest.raises(jax.errors.ConcretizationTypeError):
            run(session, step, no_jit=False)


def test_an_error_points_at_its_line(cache: Path) -> None:
    def step(model: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        if inputs["x"] > 1:  # known here alone: no branch of a compiled program
            carry = carry + jnp.ones(3)
        return carry, None

    with (
        tpuport.load("toy", cache_dir=cache) as session,
        pytest.raises(TypeError, match="incompatible shapes") as caught,
    ):
        run(session, step, no_jit=True)
    lines = [str(entry.statement) for entry in caught.traceback]
    assert any("carry = carry + jnp.ones(3)" in line for line in lines)


def test_programs_that_are_split_over_devices_run_too(cache: Path) -> None:
    with tpuport.load("toy", cache_dir=cache, mesh="dp=1,sp=1,tp=2") as session:

        def step(model: Any, carry: Any, constants: Any, inputs: Any) -> Any:
            def part(x: Any) -> Any:
                # A neighbour's values: an op of all devices together.
                other = jax.lax.ppermute(x, "tp", [(0, 1), (1, 0)])
                return x + 3 * other + jax.lax.axis_index("tp")

            whole = jax.shard_map(
                part,
                mesh=session.mesh,
                in_specs=PartitionSpec("tp"),
                out_specs=PartitionSpec("tp"),
            )
            return whole(carry + inputs["x"]), None

        eager = run(session, step, no_jit=True)
        assert np.array_equal(eager, run(session, step, no_jit=False))
        assert len(set(eager.tolist())) == 2


def test_a_pallas_kernel_stays_one_op(cache: Path) -> None:
    from jax.experimental import pallas as pl

    def kernel(x: Any, out: Any) -> None:
        out[...] = x[...] * 3.0

    def step(model: Any, carry: Any, constants: Any, inputs: Any) -> Any:
        shape = jax.ShapeDtypeStruct(carry.shape, carry.dtype)
        triple = pl.pallas_call(kernel, out_shape=shape, interpret=True)
        return triple(carry + inputs["x"]), None

    with tpuport.load("toy", cache_dir=cache) as session:
        assert run(session, step, no_jit=True).tolist() == [15.0] * 8
