"""A denoising stage with a step cache: full and cached forms of its program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import jax

from tpuport.core.arrays import to_numpy
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, Tree, Work
from tpuport.core.spec.step_cache import StepCache
from tpuport.core.tracing.forward_split import ForwardSplit, Where
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.errors import PluginError


def cached_programs(
    name: str, program: Program, split: ForwardSplit, cache: StepCache
) -> dict[str, Program]:
    """The full and the cached form of a step, as ``<name>_full`` and ``<name>_cached``.

    Both take and return the carry ``{"step": ..., "cache": history}`` and take the
    inputs ``{"step": ..., "cache_weights": [depth]}``; what is under ``"step"`` is the
    program's own. Its function runs as it is, on a model whose forward is captured or
    resumed; it must call forward equally often in every step.
    """

    def full(model: BoundModule, carry: Tree, constants: Tree, inputs: Tree) -> Any:
        captured = _Captured(model.ported, model.weights, split, cache.where, [])
        step, out = program.fn(captured, carry["step"], constants, inputs["step"])
        history = cache.record(carry["cache"], tuple(captured.states))
        return {"step": step, "cache": history}, out

    def cached(model: BoundModule, carry: Tree, constants: Tree, inputs: Tree) -> Any:
        states = cache.predict(carry["cache"], inputs["cache_weights"])
        resumed = _Resumed(model.ported, model.weights, split, cache.where, [*states])
        step, out = program.fn(resumed, carry["step"], constants, inputs["step"])
        if resumed.states:
            raise PluginError(f"{len(resumed.states)} states of {name} were not used")
        return {"step": step, "cache": carry["cache"]}, out

    return {
        f"{name}_full": replace(program, fn=full),
        f"{name}_cached": replace(program, fn=cached),
    }


def state_struct(
    program: Program,
    split: ForwardSplit,
    where: Where,
    model: BoundModule,
    args: tuple[Tree, Tree, Tree],
) -> Tree:
    """Shapes and dtypes of the state of one step, found by tracing; nothing runs.

    Args:
        model: its weights may be abstract.
        args: carry, constants and inputs of the program: arrays or tensors.
    """

    def states(weights: Tree, carry: Tree, constants: Tree, inputs: Tree) -> Tree:
        captured = _Captured(model.ported, weights, split, where, [])
        program.fn(captured, carry, constants, inputs)
        return tuple(captured.states)

    return jax.eval_shape(states, _abstract(model.weights), *map(_abstract, args))


def with_step_cache(
    stage: Stage,
    work: Work,
    split: ForwardSplit,
    cache: StepCache,
    model: BoundModule,
    structs: dict[Any, Tree] | None = None,
) -> tuple[Stage, Work]:
    """A stage and its work of one batch with step caching; each call is one step.

    Args:
        model: the component of the stage's program.
        structs: keeps what :func:`state_struct` found for the next batch of the same
            shapes and the same ``model``; tracing takes seconds for a large one.

    Raises:
        UsageError: the cache does not fit ``work.total`` steps.
        PluginError: the calls are not all of one program, or it has no forward to cut.
    """
    full = cache.schedule(work.total)
    weights = cache.weights(work.total)
    calls = iter(work.calls)
    first = next(calls)
    name = first.program
    program = stage.programs[name]
    args = _abstract((work.carry, work.constants, first.inputs))
    leaves, tree = jax.tree.flatten(args)
    key = (stage.name, name, split, cache.where, tree, *leaves)
    structs = {} if structs is None else structs
    if key not in structs:
        structs[key] = state_struct(program, split, cache.where, model, args)
    struct = structs[key]
    if not struct:
        raise PluginError(f"{stage.name}: {name} never calls the forward to cache")

    def cached_calls() -> Iterator[Call]:
        for index, call in enumerate(chain([first], calls)):
            if call.program != name:
                raise PluginError(
                    f"{stage.name}: step caching needs one program, not {name} and "
                    f"{call.program}"
                )
            inputs = {"step": call.inputs, "cache_weights": weights[index]}
            yield Call(f"{name}_full" if full[index] else f"{name}_cached", inputs)

    programs = cached_programs(name, program, split, cache)
    cached = replace(
        work,
        carry={"step": work.carry, "cache": cache.initial(struct)},
        calls=cached_calls(),
        finish=lambda carry, outputs: work.finish(carry["step"], outputs),
        programs=tuple(programs),
    )
    return replace(stage, programs={**stage.programs, **programs}), cached


@dataclass(frozen=True, slots=True)
class _Split(BoundModule):
    """A model within a step whose forward is cut; one state per call of forward."""

    split: ForwardSplit
    where: Where
    states: list[Tree]


@dataclass(frozen=True, slots=True)
class _Captured(_Split):
    def __call__(self, *args: Any, method: str = "forward", **kwargs: Any) -> Any:
        """Forward as ever; its state is kept."""
        if method != "forward":
            return BoundModule.__call__(self, *args, method=method, **kwargs)
        whole = BoundModule(self.ported, self.weights)
        out, state = whole.capture(self.split, self.where, *args, **kwargs)
        self.states.append(state)
        return out


@dataclass(frozen=True, slots=True)
class _Resumed(_Split):
    def __call__(self, *args: Any, method: str = "forward", **kwargs: Any) -> Any:
        """Forward from the next state on."""
        if method != "forward":
            return BoundModule.__call__(self, *args, method=method, **kwargs)
        if not self.states:
            raise PluginError("a cached step calls forward more often than a full one")
        whole = BoundModule(self.ported, self.weights)
        state = self.states.pop(0)
        return whole.resume(self.split, self.where, state, *args, **kwargs)


def _abstract(tree: Tree) -> Tree:
    """Shapes and dtypes of arrays, tensors or structs, as the executor places them."""

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            leaf = to_numpy(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(struct, tree)
