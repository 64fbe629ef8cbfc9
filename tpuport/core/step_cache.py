"""Step caching: most denoising steps in the middle reuse what full steps computed.

Off unless asked for, and then it changes the video. ``deepcache`` keeps the state
before the last block and runs that block again; ``taylorseer`` keeps the features after
the last block of a few full steps and extrapolates them. Which steps are full is fixed
before the run, so a run has two programs and no decision on the device. A plugin
declares nothing but its :class:`~tpuport.core.splitting.ForwardSplit`.

Sources: DeepCache, arXiv 2312.00858, here as ports of video transformers have it;
TaylorSeer, arXiv 2503.06923, on the output of the last block alone (diffusers 0.42
``TaylorSeerCacheConfig`` has a mode of that kind, ``use_lite_mode``).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from tpuport.core.arrays import to_numpy
from tpuport.core.module import BoundModule
from tpuport.core.spec import Call, Program, Stage, Tree, Work
from tpuport.core.splitting import ForwardSplit, Where
from tpuport.errors import PluginError, UsageError

if TYPE_CHECKING:
    import jax
    import numpy as np

METHODS: Mapping[str, Where] = {
    "deepcache": "before_last",
    "taylorseer": "after_last",
}
"""Where each method takes the forward's state."""

#: Highest order of an extrapolation; docs/step-caching.md says what it amplifies.
MAX_ORDER = 4

#: Full steps at the start and from the end on, of 50; other schedules in proportion.
START, END, OF = 11, 45, 50

_EXAMPLE = 'write for example "deepcache" or "taylorseer:start=11,end=45,interval=4"'


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCache:
    """Which steps are cached, and from what.

    Attributes:
        method: a key of :data:`METHODS`.
        start: the last of the full steps at the beginning, counted from 0; ``None`` for
            11 of 50 in proportion to the steps.
        end: the first of the full steps at the end; ``None`` for 45 of 50.
        interval: from start to end, every so many-th step is full.
        order: of the extrapolation, ``taylorseer`` only; ``None`` is 1 there.

    Raises:
        UsageError: an unknown method, or a value that is wrong for any number of steps.
    """

    method: str
    start: int | None = None
    end: int | None = None
    interval: int = 4
    order: int | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UsageError(
                f"step cache {self.method!r} is unknown; choose one of "
                f"{', '.join(METHODS)}, none{_nearest_word(self.method, METHODS)}"
            )
        for name in ("start", "end", "interval", "order"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool) or not isinstance(value, int)
            ):
                raise UsageError(
                    f"{self.method}: {name} {value!r} is not a whole number"
                )
        if self.method == "taylorseer":
            if self.order is None:
                object.__setattr__(self, "order", 1)
            self._check("order", 1, MAX_ORDER)
        elif self.order is not None:
            raise UsageError(
                f"{self.method} has no order; it is a setting of taylorseer"
            )
        self._check("interval", 2, None)
        self._check("start", self._first_start, None)
        self._check("end", (self.start or self._first_start) + 2, None)

    @classmethod
    def parse(cls, value: StepCache | str | None) -> StepCache | None:
        """The cache that a value from a user or a file stands for.

        Accepts a cache, ``None``, ``"none"``, a method, or a method and settings:
        ``"deepcache:start=11,end=45,interval=4"``. ``str(cache)`` reads back as itself.

        Raises:
            UsageError: what is wrong, the legal values and the nearest of them.
        """
        if value is None or isinstance(value, StepCache):
            return value
        if not isinstance(value, str):
            raise UsageError(f"step cache {value!r} is not a string; {_EXAMPLE}")
        method, colon, rest = (part.strip() for part in value.partition(":"))
        if method == "none" and not colon:
            return None
        if method not in METHODS:
            # By name first, whatever its settings are.
            cls(method=method)
        names = ["start", "end", "interval"]
        names += ["order"] if method == "taylorseer" else []
        found: dict[str, int] = {}
        for item in rest.split(",") if colon else ():
            name, equals, text = (part.strip() for part in item.partition("="))
            if not equals or name not in names:
                raise UsageError(
                    f"step cache {value!r}: {item.strip()!r} is not a setting of "
                    f"{method}; it has {', '.join(names)}{_nearest_word(name, names)}; "
                    + _EXAMPLE
                )
            if name in found:
                raise UsageError(f"step cache {value!r}: {name} is given twice")
            try:
                found[name] = int(text)
            except ValueError:
                raise UsageError(
                    f"step cache {value!r}: {name} {text!r} is not a whole number; "
                    + _EXAMPLE
                ) from None
        return cls(method=method, **found)

    def __str__(self) -> str:
        names = ("start", "end", "interval", "order")
        given = [(name, getattr(self, name)) for name in names]
        return f"{self.method}:" + ",".join(
            f"{name}={value}" for name, value in given if value is not None
        )

    @property
    def where(self) -> Where:
        """Where in the forward the state is taken and put back."""
        return METHODS[self.method]

    @property
    def depth(self) -> int:
        """How many states are kept."""
        return 1 + (self.order or 0)

    @property
    def _first_start(self) -> int:
        """The first start: before it there are too few full steps for the order."""
        return max(1, self.order or 0)

    def resolve(self, steps: int) -> StepCache:
        """This cache with start and end for a run of ``steps``.

        Raises:
            UsageError: start or end is out of range for so many steps, or there are too
                few steps to cache any.
        """
        least = self._first_start + 2
        if steps < least:
            raise UsageError(
                f"{self} would cache none of {steps} steps; it needs at least {least} "
                "steps, or --cache none"
            )
        # Rounded to the nearest step; 50 steps give 11 and 45.
        start, end = ((part * steps + OF // 2) // OF for part in (START, END))
        latest = (steps if self.end is None else min(self.end, steps)) - 2
        start = min(max(start, self._first_start), latest)
        if self.start is not None:
            self._check("start", self._first_start, latest, steps)
            start = self.start
        if self.end is not None:
            self._check("end", start + 2, steps, steps)
            end = self.end
        end = min(max(end, start + 2), steps)
        return replace(self, start=start, end=end)

    def schedule(self, steps: int) -> tuple[bool, ...]:
        """Whether each step is full.

        Steps before ``start`` and from ``end`` on are, and in between those with
        ``(step - start) % interval == 0``: 11, 45, 4 of 50 make 25 full steps (0-10,
        11, 15, ..., 43, 45-49) and 25 cached ones.

        Raises:
            UsageError: see :meth:`resolve`.
        """
        start, end = self._range(steps)
        return tuple(
            not start <= step < end or (step - start) % self.interval == 0
            for step in range(steps)
        )

    def weights(self, steps: int) -> np.ndarray:
        """The prediction of each cached step as weights of the states kept.

        The polynomial in the step index through the last ``depth`` full steps (Newton's
        divided differences, in Lagrange's form) is evaluated at the cached step. It is
        exact for features that are such a polynomial, however the full steps are
        spaced. Of order 1 it is TaylorSeer's formula; from 2 on TaylorSeer puts
        backward differences in place of derivatives in a Taylor series, which misses a
        polynomial of its own order.

        Returns:
            Float32 [steps, depth], the newest state first; zeros for full steps.
        """
        import numpy as np

        table = np.zeros((steps, self.depth), np.float32)
        nodes: list[int] = []
        for step, full in enumerate(self.schedule(steps)):
            if full:
                nodes = [step, *nodes][: self.depth]
                continue
            for m, node in enumerate(nodes):
                others = [other for other in nodes if other != node]
                table[step, m] = np.prod([(step - o) / (node - o) for o in others])
        return table

    def initial(self, struct: Tree) -> tuple[Tree, ...]:
        """The states kept before the first step: zeros, none of which is ever read.

        Args:
            struct: shapes and dtypes of one state; see :func:`state_struct`.
        """
        import jax
        import numpy as np

        return tuple(
            jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), struct)
            for _ in range(self.depth)
        )

    def record(self, history: tuple[Tree, ...], state: Tree) -> tuple[Tree, ...]:
        """``history`` with the newest state in front and the oldest dropped."""
        return (state, *history[:-1])

    def predict(self, history: tuple[Tree, ...], weights: jax.Array) -> Tree:
        """The state of a cached step from ``weights`` [depth], its row of the table.

        Summed in float32 and cast back. A single state is passed on as it is.
        """
        import jax
        import jax.numpy as jnp

        if self.depth == 1:
            return history[0]

        def combine(*leaves: jax.Array) -> jax.Array:
            terms = (weights[m] * x.astype(jnp.float32) for m, x in enumerate(leaves))
            return sum(terms, start=jnp.float32(0)).astype(leaves[0].dtype)

        return jax.tree.map(combine, *history)

    def _range(self, steps: int) -> tuple[int, int]:
        resolved = self.resolve(steps)
        assert resolved.start is not None
        assert resolved.end is not None
        return resolved.start, resolved.end

    def _check(
        self, name: str, least: int, most: int | None, steps: int | None = None
    ) -> None:
        value = getattr(self, name)
        if value is None or (value >= least and (most is None or value <= most)):
            return
        nearest = least if most is None else min(max(value, least), most)
        legal = f"at least {least}" if most is None else f"{least} to {most}"
        of = "" if steps is None else f" of {steps} steps"
        raise UsageError(
            f"{self.method}: {name}={value}{of} asked for; it must be {legal}; nearest "
            f"valid: {nearest}"
        )


# ------------------------------------------------------------------- in a stage


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
    import jax

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
    import jax

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
    import jax

    def struct(leaf: Any) -> jax.ShapeDtypeStruct:
        if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct):
            leaf = to_numpy(leaf)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)

    return jax.tree.map(struct, tree)


def _nearest_word(word: str, known: Any) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
