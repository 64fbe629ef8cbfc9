"""Whole runs with step caching against eager torch that caches the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.run.step_caching import cached_programs, state_struct, with_step_cache
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, Work
from tpuport.core.spec.step_cache import StepCache
from tpuport.core.tracing.forward_split import ForwardSplit
from tpuport.core.tracing.ported_module import BoundModule, PortedModule
from tpuport.errors import PluginError, UsageError


def parse(text: str) -> StepCache:
    cache = StepCache.parse(text)
    assert cache is not None
    return cache


class Block(torch.nn.Module):
    """A residual block on hidden [B, L, W] and encoder [B, M, W], mixing both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.mlp = torch.nn.Linear(width, width)
        self.context = torch.nn.Linear(width, width)

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        temb: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = hidden_states + encoder_hidden_states.mean(1, keepdim=True)
        hidden = hidden_states + temb * torch.tanh(self.mlp(self.norm(mixed)))
        text = self.context(encoder_hidden_states + hidden.mean(1, keepdim=True))
        return hidden, encoder_hidden_states + torch.tanh(text)


class Toy(torch.nn.Module):
    """The outline of a video transformer: embeddings, blocks, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 16)
        self.time = torch.nn.Linear(2, 16)
        self.blocks = torch.nn.ModuleList(Block(16) for _ in range(3))
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 4)

    def temb(self, t: torch.Tensor) -> torch.Tensor:
        return self.time(torch.stack([torch.sin(3 * t), torch.cos(3 * t)], -1))[:, None]

    def out(self, hidden: torch.Tensor, temb: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(hidden) * (1 + temb))

    def forward(
        self, latents: torch.Tensor, text: torch.Tensor, t: torch.Tensor
    ) -> torch.Tensor:
        hidden, temb = self.embed(latents), self.temb(t)
        for block in self.blocks:
            hidden, text = block(hidden, encoder_hidden_states=text, temb=temb)
        return self.out(hidden, temb)


SPLIT = ForwardSplit(blocks=("blocks",), head=("hidden_states",))
STEPS = 20
SETTINGS = "start=4,end=17,interval=4"
FULL = [0, 1, 2, 3, 4, 8, 12, 16, 17, 18, 19]
ATOL = TOLERANCES["module float32"]


@pytest.fixture
def toy() -> Toy:
    torch.manual_seed(0)
    return Toy().eval()


def one_call(
    model: BoundModule, carry: Any, constants: Any, inputs: Any
) -> tuple[Any, Any]:
    """Both guidance rows in one call."""
    rows = jnp.concatenate([carry["latents"]] * 2)
    t = jnp.broadcast_to(inputs["t"], (rows.shape[0],))
    prediction = model(rows, constants["text"], t)
    uncond, cond = jnp.split(prediction, 2)
    latents = carry["latents"] - (uncond + 2.0 * (cond - uncond)) / STEPS
    return {"latents": latents}, {"finite": jnp.isfinite(latents).all()}


def two_calls(
    model: BoundModule, carry: Any, constants: Any, inputs: Any
) -> tuple[Any, Any]:
    """The same, one call after the other."""
    latents = carry["latents"]
    t = jnp.broadcast_to(inputs["t"], (latents.shape[0],))
    uncond, cond = (model(latents, text, t) for text in jnp.split(constants["text"], 2))
    latents = latents - (uncond + 2.0 * (cond - uncond)) / STEPS
    return {"latents": latents}, {"finite": jnp.isfinite(latents).all()}


def stage_of(fn: Any, names: Sequence[str] = ("step",)) -> Stage:
    return Stage(
        name="denoise",
        unit="step",
        components=("transformer",),
        programs={name: Program(component="transformer", fn=fn) for name in names},
        plan=lambda ctx: pytest.fail("not called"),
        upstream=lambda ctx: pytest.fail("not called"),
        writes=(),
    )


def tensors(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch)
    latents = torch.randn(batch, 6, 4, generator=generator)
    return latents, torch.randn(2 * batch, 3, 16, generator=generator)


def times() -> list[np.float32]:
    return [np.float32(1 - step / STEPS) for step in range(STEPS)]


def work_of(batch: int, names: Sequence[str] = ("step",)) -> Work:
    latents, text = tensors(batch)
    return Work(
        carry={"latents": latents},
        constants={"text": text},
        calls=(Call(names[i % len(names)], {"t": t}) for i, t in enumerate(times())),
        total=STEPS,
        finish=lambda carry, outputs: {"latents": np.asarray(carry["latents"])},
        watch=lambda index, output: None,
    )


def bind(module: torch.nn.Module) -> BoundModule:
    ported = PortedModule(module, model_runtime(mesh=None, platform="cpu"))
    weights = {k: jnp.asarray(to_numpy(v)) for k, v in module.state_dict().items()}
    return ported.bind(weights)


def execute(
    stage: Stage, work: Work, model: BoundModule
) -> tuple[np.ndarray, list[str], set[Any]]:
    """What an executor does: (latents, programs called, signatures compiled)."""
    compiled = {
        name: jax.jit(
            lambda w, c, k, i, fn=program.fn: fn(model.ported.bind(w), c, k, i),
            donate_argnums=1,
        )
        for name, program in stage.programs.items()
    }
    carry, constants = jax.tree.map(
        lambda x: jnp.asarray(to_numpy(x)), (work.carry, work.constants)
    )
    called, signatures = [], set()
    outputs = []
    for call in work.calls:
        called.append(call.program)
        leaves, tree = jax.tree.flatten((carry, constants, call.inputs))
        shapes = tuple((x.shape, str(x.dtype)) for x in leaves)
        signatures.add((call.program, tree, shapes))
        step = compiled[call.program]
        carry, output = step(model.weights, carry, constants, call.inputs)
        outputs.append(output)
    return work.finish(carry, outputs)["latents"], called, signatures


def run_cached(
    toy: Toy, cache: StepCache, batch: int, fn: Any = one_call
) -> tuple[np.ndarray, list[str], set[Any]]:
    model = bind(toy)
    stage, work = with_step_cache(stage_of(fn), work_of(batch), SPLIT, cache, model)
    return execute(stage, work, model)


@torch.no_grad()
def reference(toy: Toy, method: str, batch: int, order: int) -> np.ndarray:
    """The same caching by eager torch, written out for this module."""
    latents, text = tensors(batch)
    kept: list[tuple[int, Any]] = []
    for step, t in enumerate(times()):
        temb = toy.temb(torch.full((2 * batch,), float(t)))
        *blocks, last = toy.blocks
        if method == "none" or step in FULL:
            hidden, context = toy.embed(torch.cat([latents, latents])), text
            for block in blocks:
                hidden, context = block(hidden, context, temb)
            state = (hidden, context)
            hidden, context = last(hidden, context, temb)
            kept.append((step, state if method == "deepcache" else hidden))
        elif method == "deepcache":
            hidden, _ = last(*kept[-1][1], temb)
        else:
            (s2, f2), (s1, f1), (s0, f0) = kept[-3:]
            slope = (f0 - f1) / (s0 - s1)
            hidden = f0 + slope * (step - s0)
            if order == 2:
                bend = (slope - (f1 - f2) / (s1 - s2)) / (s0 - s2)
                hidden = hidden + bend * (step - s0) * (step - s1)
        uncond, cond = toy.out(hidden, temb).chunk(2)
        latents = latents - (uncond + 2.0 * (cond - uncond)) / STEPS
    return latents.numpy()


RUNS = [("deepcache", 0), ("taylorseer", 1), ("taylorseer", 2)]


def cache_of(method: str, order: int) -> StepCache:
    return parse(f"{method}:{SETTINGS}" + (f",order={order}" if order else ""))


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("method", "order"), RUNS)
def test_a_cached_run_is_eager_torch_with_the_same_caching(
    toy: Toy, method: str, order: int, batch: int
) -> None:
    found, called, signatures = run_cached(toy, cache_of(method, order), batch)
    expected = reference(toy, method, batch, order)
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)
    # Not the exact run, and full steps where they should be.
    exact = reference(toy, "none", batch, 0)
    assert np.abs(expected - exact).max() > 100 * ATOL
    assert [i for i, name in enumerate(called) if name == "step_full"] == FULL
    assert set(called) == {"step_full", "step_cached"}
    # One compile of each: no step has shapes or structures of its own.
    assert len(signatures) == 2


@pytest.mark.parametrize(("method", "order"), RUNS[:2])
def test_a_step_may_call_the_forward_more_than_once(
    toy: Toy, method: str, order: int
) -> None:
    found, _, _ = run_cached(toy, cache_of(method, order), 2, two_calls)
    expected = reference(toy, method, 2, order)
    np.testing.assert_allclose(found, expected, rtol=0, atol=ATOL)


def test_extrapolation_is_nearer_to_the_exact_run_on_a_smooth_trajectory(
    toy: Toy,
) -> None:
    exact = reference(toy, "none", 2, 0)
    deepcache, linear = (
        np.square(run_cached(toy, cache_of(*run), 2)[0] - exact).mean()
        for run in RUNS[:2]
    )
    assert linear < deepcache / 4


def test_the_stage_is_as_it_was_without_a_cache(toy: Toy) -> None:
    model = bind(toy)
    stage = stage_of(one_call)
    plain, called, _ = execute(stage, work_of(2), model)
    cache = cache_of("deepcache", 0)
    cached_stage, work = with_step_cache(stage, work_of(2), SPLIT, cache, model)
    assert work.programs == ("step_full", "step_cached")
    assert work.total == STEPS
    assert work.watch is not None
    assert cached_stage.programs["step"] is stage.programs["step"]
    assert set(stage.programs) == {"step"}
    execute(cached_stage, work, model)
    again, _, _ = execute(stage, work_of(2), model)
    np.testing.assert_array_equal(again, plain)
    assert called == ["step"] * STEPS
    expected = reference(toy, "none", 2, 0)
    np.testing.assert_allclose(plain, expected, rtol=0, atol=ATOL)


@pytest.mark.parametrize(("method", "order"), RUNS)
def test_every_tensor_is_an_input_of_both_programs(
    toy: Toy, method: str, order: int
) -> None:
    model = bind(toy)
    cache = cache_of(method, order)
    stage, work = with_step_cache(stage_of(one_call), work_of(1), SPLIT, cache, model)
    args = jax.tree.map(
        to_numpy, (work.carry, work.constants, next(iter(work.calls)).inputs)
    )
    for name in work.programs:
        fn = stage.programs[name].fn
        closed = jax.make_jaxpr(
            lambda w, *args, fn=fn: fn(model.ported.bind(w), *args)
        )(model.weights, *args)
        assert [c for c in closed.consts if np.size(c) > 1] == []
        assert len(closed.jaxpr.invars) == len(jax.tree.leaves((model.weights, args)))


def test_the_state_is_found_without_weights_or_data() -> None:
    with torch.device("meta"):
        toy = Toy()
    ported = PortedModule(toy, model_runtime(mesh=None, platform="cpu"))
    model = ported.bind(ported.abstract_weights(lambda name, tensor: jnp.bfloat16))
    latents, text = tensors(2)
    args = (
        {"latents": latents.bfloat16()},
        {"text": text.bfloat16()},
        {"t": jax.ShapeDtypeStruct((), jnp.bfloat16)},
    )
    program = Program(component="transformer", fn=one_call)
    hidden = jax.ShapeDtypeStruct((4, 6, 16), jnp.bfloat16)
    encoder = jax.ShapeDtypeStruct((4, 3, 16), jnp.bfloat16)
    assert state_struct(program, SPLIT, "before_last", model, args) == (
        {"hidden_states": hidden, "encoder_hidden_states": encoder},
    )
    found = state_struct(program, SPLIT, "after_last", model, args)
    assert found == ({"hidden_states": hidden},)


def test_the_state_is_traced_once_for_batches_of_one_shape(toy: Toy) -> None:
    traced: list[int] = []

    def counted(*args: Any) -> Any:
        traced.append(1)
        return one_call(*args)

    model, structs = bind(toy), dict[Any, Any]()
    cache = cache_of("taylorseer", 1)
    for batch, times_traced in ((2, 1), (2, 1), (1, 2)):
        _, work = with_step_cache(
            stage_of(counted), work_of(batch), SPLIT, cache, model, structs
        )
        assert len(traced) == times_traced
        assert work.carry["cache"][0][0]["hidden_states"].shape == (2 * batch, 6, 16)


def test_steps_of_several_programs_are_refused(toy: Toy) -> None:
    names = ("high", "low")
    _, work = with_step_cache(
        stage_of(one_call, names),
        work_of(1, names),
        SPLIT,
        cache_of("deepcache", 0),
        bind(toy),
    )
    with pytest.raises(PluginError, match="needs one program, not high and low"):
        list(work.calls)


def no_call(model: BoundModule, carry: Any, constants: Any, inputs: Any) -> Any:
    return carry, None


def test_a_step_without_a_forward_is_refused(toy: Toy) -> None:
    with pytest.raises(PluginError, match="never calls the forward"):
        run_cached(toy, cache_of("deepcache", 0), 1, no_call)


def test_too_few_steps_are_refused_before_anything_is_traced(toy: Toy) -> None:
    cache = parse("deepcache:start=4,end=40")
    with pytest.raises(UsageError, match="end=40 of 20 steps"):
        run_cached(toy, cache, 1, no_call)


@pytest.mark.parametrize(
    ("full", "cached", "message"),
    [
        (two_calls, one_call, "1 states of step were not used"),
        (one_call, two_calls, "calls forward more often"),
    ],
    ids=["fewer", "more"],
)
def test_a_cached_step_must_call_forward_as_often_as_a_full_one(
    toy: Toy, full: Any, cached: Any, message: str
) -> None:
    steps: Mapping[str, Any] = {"full": full, "cached": cached}
    model = bind(toy)
    latents, text = tensors(1)
    carry: Any = {"latents": jnp.asarray(latents.numpy())}
    constants = {"text": jnp.asarray(text.numpy())}
    cache = cache_of("deepcache", 0)
    programs = {
        name: cached_programs(
            "step", Program(component="transformer", fn=fn), SPLIT, cache
        )[f"step_{name}"].fn
        for name, fn in steps.items()
    }
    inputs = {"step": {"t": times()[0]}, "cache_weights": np.ones(1, np.float32)}
    before = {"step": carry, "cache": ()}
    carry, _ = jax.eval_shape(
        lambda *args: programs["full"](model, *args), before, constants, inputs
    )
    with pytest.raises(PluginError, match=message):
        jax.eval_shape(
            lambda *args: programs["cached"](model, *args), carry, constants, inputs
        )
