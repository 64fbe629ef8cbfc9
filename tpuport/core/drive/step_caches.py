"""Step caching of any denoiser: a wrapper around its forward, in plain torch.

The wrapper stands below the seam, so a full and a cached forward become two programs,
and upstream's own code has the same cache. What a forward is to do stands in an
attribute of the module while the call lasts. The states that are kept are tensors that
stay on the devices. Each call of a step has its own: with the prompt and without, and
one of each expert.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tpuport.core.drive.found_split import NoSplitError, block_lists, found_split
from tpuport.core.enums import denoises
from tpuport.core.seam.journal import Asked
from tpuport.core.seam.module_weights import fitting
from tpuport.core.seam.target import Target
from tpuport.core.spec.step_cache import StepCache
from tpuport.core.tracing.block_stacks import forwards_replaced
from tpuport.core.tracing.forward_split import ForwardSplit, Where, capture, resume
from tpuport.errors import UsageError

#: Where a module has its :class:`CacheCall` while it is called.
_HELD = "_step_cache"

State = dict[str, torch.Tensor]
History = tuple[tuple[int, State], ...]
"""The states of full steps, each with the number of its step; the newest first."""
Key = tuple[Any, ...]
"""Tells the calls of one step apart."""


class StepCacheError(UsageError):
    """A pipeline that has no step cache, or not this one."""


@dataclass(eq=False)
class CacheCall:
    """What one call of forward is to do, and what it kept.

    The seam takes an object of this name apart: its tensors are a program's inputs and
    outputs, its plain values a part of the program's key.

    Attributes:
        split, where: where forward splits.
        states: to predict from; without any, forward is full.
        weights: float32 [depth], of the prediction; ``None`` for a single state.
        kept: the state that a full forward kept.
    """

    split: ForwardSplit
    where: Where
    states: tuple[State, ...] = ()
    weights: torch.Tensor | None = None
    kept: State | None = None

    def predicted(self) -> State:
        """The state of a cached step, summed in float32; a single state as it is."""
        if self.weights is None:
            return self.states[0]
        found: State = {}
        for name, newest in self.states[0].items():
            total = self.weights[0] * newest.float()
            for number, state in enumerate(self.states[1:], 1):
                total = total + self.weights[number] * state[name].float()
            found[name] = total.to(newest.dtype)
        return found


@dataclass(eq=False)
class StepCaches:
    """The step cache of a pipeline's denoisers.

    Attributes:
        cache: which steps are cached, and from what.
        modules: the denoisers, by component.
        target: what programs are made for; ``None`` for upstream's own code.
        histories: what is kept, by call of a step.
        on_call: told that a call is about to be made, whose split is known.
        calls: how many calls of denoisers there were, and how many were cached.
    """

    cache: StepCache
    modules: Mapping[str, torch.nn.Module]
    target: Target | None = None
    histories: dict[Key, History] = field(default_factory=dict)
    on_call: Callable[[], None] = lambda: None
    calls: tuple[int, int] = (0, 0)
    _splits: dict[Key, ForwardSplit] = field(default_factory=dict)
    _declared: dict[str, ForwardSplit | None] = field(default_factory=dict)
    _timesteps: Any = None
    _full: Sequence[bool] = ()
    _step: int = 0
    _made: dict[Key, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, module in self.modules.items():
            if not block_lists(module):
                raise self._refused(name, "it has no list of blocks")

    def other(self, cache: StepCache) -> StepCaches:
        """Another step cache of the same denoisers."""
        return StepCaches(cache, self.modules, self.target)

    def taken(self, asked: Asked, timesteps: Any, total: int) -> Asked:
        """A call that upstream makes, full or cached.

        Args:
            timesteps: of the scheduler: other ones begin another pass.
            total: the number of steps of the pass.
        """
        if asked.name not in self.modules:
            return asked
        answer = functools.partial(self._answered, asked, timesteps, total)
        return replace(asked, answer=answer)

    def stepping(self, timesteps: Any, total: int) -> None:
        """The scheduler is about to make a step."""
        self._begin(timesteps, total)
        self._step += 1
        self._made.clear()
        if self._step == len(self._full):
            self.histories = {}  # the devices have other work then

    def _begin(self, timesteps: Any, total: int) -> None:
        """Begin a pass over the timesteps, unless one is under way."""
        if timesteps is self._timesteps and self._step < len(self._full):
            return
        try:
            self._full = self.cache.schedule(total)
        except UsageError as error:
            if self._timesteps is None:
                raise StepCacheError(str(error)) from error
            # A short pass after the first one: refining has few steps.
            self._full = (True,) * max(total, 1)
        self._timesteps = timesteps
        self._step, self.histories = 0, {}
        self._made.clear()
        self._declared.clear()  # an adapter may have come

    def _answered(
        self, asked: Asked, timesteps: Any, total: int, *args: Any, **kwargs: Any
    ) -> Any:
        self._begin(timesteps, total)
        own = (asked.name, _kind((args, kwargs)))
        split = self._split(own, asked, args, kwargs)
        self.on_call()
        number = self._made[own] = self._made.get(own, -1) + 1
        key = (*own, number)
        history = self.histories.get(key, ())
        cached = self._is_cached(history)
        call = CacheCall(split, self.cache.where)
        if cached:
            call.states = tuple(state for _, state in history)
            if len(history) > 1:
                weights = self.cache.weights_at(self._step, [s for s, _ in history])
                call.weights = torch.from_numpy(weights)
        vars(asked.module)[_HELD] = call
        try:
            result = asked.answer(*args, **kwargs)
        finally:
            del vars(asked.module)[_HELD]
        self.calls = self.calls[0] + 1, self.calls[1] + cached
        if not cached:
            assert call.kept is not None
            newest = (self._step, call.kept)
            self.histories = {
                **self.histories,
                key: (newest, *history)[: self.cache.depth],
            }
        return result

    def _is_cached(self, history: History) -> bool:
        """Whether a call is cached: the schedule says so, and no full step is missed.

        An expert that takes over has no states yet: its first calls are full.
        """
        if self._full[self._step] or len(history) < self.cache.depth:
            return False
        last = max(s for s in range(self._step) if self._full[s])
        return history[0][0] >= last

    def _split(self, kind: Key, asked: Asked, args: Any, kwargs: Any) -> ForwardSplit:
        """Where a denoiser's forward splits; looked for once in each kind of call."""
        if asked.name not in self._declared:
            claim = None
            if self.target is not None:
                claim, _ = fitting(asked.name, asked.module, self.target)
            self._declared[asked.name] = None if claim is None else claim.split
        if (declared := self._declared[asked.name]) is not None:
            return declared
        if kind not in self._splits:
            before_last = self.cache.where == "before_last"
            try:
                self._splits[kind] = found_split(
                    asked.module, args, kwargs, before_last=before_last
                )
            except NoSplitError as error:
                raise self._refused(asked.name, str(error)) from error
        return self._splits[kind]

    def _refused(self, name: str, why: str) -> StepCacheError:
        kind = type(self.modules[name]).__name__
        return StepCacheError(
            f"step cache {self.cache}: {name} ({kind}) has no place where forward "
            f"splits: {why}; leave the step cache out"
        )


def standing(modules: Iterable[torch.nn.Module]) -> AbstractContextManager[None]:
    """In this block forwards of ``modules`` do what their :class:`CacheCall` says."""
    return forwards_replaced([(one, _forward_of(one)) for one in modules])


def _forward_of(module: torch.nn.Module) -> Callable[..., Any]:
    kind = type(module)

    @functools.wraps(kind.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        # Of its class at the time of a call: a patch may stand there.
        original = kind.forward.__get__(module)
        call: CacheCall | None = vars(module).get(_HELD)
        if call is None:
            return original(*args, **kwargs)
        if call.states:
            with resume(module, call.split, call.where, call.predicted()):
                return original(*args, **kwargs)
        with capture(module, call.split, call.where) as state:
            result = original(*args, **kwargs)
        call.kept = state
        return result

    return forward


def step_caches(
    pipeline: Any, cache: StepCache, target: Target | None = None
) -> StepCaches:
    """The step cache of a pipeline.

    Args:
        target: what programs are made for; ``None`` for upstream's own code.

    Raises:
        StepCacheError: there is no denoiser, or one has no lists of blocks.
    """
    modules = {
        name: component
        for name, component in pipeline.components.items()
        if isinstance(component, torch.nn.Module) and denoises(name)
    }
    if not modules:
        raise StepCacheError(
            f"step cache {cache}: {type(pipeline).__name__} has no denoiser; leave the "
            "step cache out"
        )
    return StepCaches(cache, modules, target)


def _kind(value: Any) -> Any:
    """What tells calls apart: shapes of tensors, switches and texts, and no numbers."""
    if isinstance(value, torch.Tensor):
        return "tensor", tuple(value.shape)
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_kind, value))
    if isinstance(value, Mapping):
        return tuple((str(key), _kind(part)) for key, part in value.items())
    return type(value).__name__
