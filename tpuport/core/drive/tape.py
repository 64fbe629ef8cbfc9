"""What a run of a pipeline has done so far, recorded and given back.

Upstream's code runs again from its first line and is given back what it was given
before: the answers of encoders, and the last result of ``scheduler.step`` with the
state of the scheduler and of the random numbers. What comes after depends on nothing
else, so a denoiser's answers are zeros until then. Where no scheduler makes steps, the
answers of denoisers are given back. The run goes on to the same bytes, in another
process or on another machine.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tpuport.core.drive.kept_values import Kept, KeptError, Place, kept, shape_of
from tpuport.core.drive.step_caches import History, Key, StepCaches
from tpuport.core.enums import StageName, denoises
from tpuport.core.seam.device_tensors import DeviceTensor, version
from tpuport.core.seam.journal import Asked
from tpuport.core.seam.module_state import Attributes, ModuleTree
from tpuport.core.seam.module_weights import is_denoiser
from tpuport.core.seam.values import FormError, equal, tensors_in
from tpuport.errors import ArtifactError

#: Attributes of a scheduler that no step changes.
_FIXED = frozenset({"_internal_dict", "step"})


class StageEnd(BaseException):
    """Ends a run of upstream's code where a stage, or a rehearsal, ends."""


class TapeError(ArtifactError):
    """A run cannot go on from a tape."""

    def __init__(self, text: str) -> None:
        super().__init__(
            f"{text}; begin the run again, in another folder if it has one"
        )


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a component.

    Attributes:
        name: the component, and the path or the method within.
        answer: of a denoiser its shape; ``None`` if the call is made again: it changed
            tensors of its module or of its arguments, or no file can hold its answer.
        given: a digest of the arguments of a call that is made again.
        random: the state of the random numbers afterwards, if the call drew some.
    """

    name: str
    answer: Kept | None
    given: int
    random: Kept | None


@dataclass(frozen=True, slots=True)
class Step:
    """The last ``scheduler.step`` of one pass over the timesteps.

    Attributes:
        scheduler: in the order in which schedulers came to be; a pipeline may copy its
            scheduler.
        number: of the scheduler's steps, from 0.
        result: what the step returned.
        state: attributes of the scheduler, and of guidance.
        random: the state of the random numbers afterwards.
    """

    scheduler: int
    number: int
    result: Kept
    state: Kept
    random: Kept


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a tape holds at one moment.

    Attributes:
        calls: all of them.
        steps: the last one of each pass.
        stepped: how many there were; without a scheduler, calls of denoisers.
        finished: the last stage that is over.
        histories: what a step cache keeps; nobody writes to these tensors.
    """

    calls: tuple[Call, ...] = ()
    steps: tuple[Step, ...] = ()
    stepped: int = 0
    finished: StageName | None = None
    histories: Mapping[Key, History] = field(default_factory=dict)


@dataclass(slots=True)
class _Pass:
    """Where a scheduler stands in its timesteps; another tensor begins another pass."""

    timesteps: Any
    #: Of the next step.
    index: int | None
    #: The place of the pass in the list of steps.
    at: int | None


@dataclass(frozen=True, slots=True, eq=False)
class _Look:
    """What a call may change that lives on, at one moment.

    A denoiser may keep keys and values of frames that are done. Such a call is made
    again when a run goes on; others need not be.

    Attributes:
        own, given: the tensors in attributes of the module, and in the arguments.
        marks: of both, which tensor it is and how often something wrote to the tensor.
    """

    own: Sequence[torch.Tensor]
    given: Sequence[torch.Tensor]
    marks: tuple[Sequence[tuple[int, int]], Sequence[tuple[int, int]]]

    @classmethod
    def at(cls, own: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> _Look:
        ours, theirs = ([(id(t), version(t)) for t in each] for each in (own, given))
        return cls(own, given, (ours, theirs))

    def digest(self, before: _Look) -> int:
        """A digest of the arguments that a call since ``before`` only read."""
        found = 0
        for tensor, mark in zip(self.given, self.marks[1], strict=True):
            if mark in before.marks[1]:
                # Of a tensor on the devices the copy: no program makes it flat there.
                if isinstance(tensor, DeviceTensor):
                    tensor = tensor.on_host()
                data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
                found = zlib.crc32(data.numpy(), found)
        return found


@dataclass(eq=False)
class Tape:
    """Answers the calls of one run: first those recorded, then live.

    Attributes:
        before: what an earlier run recorded.
        recorded: what another run can go on from: all that was recorded by the time
            that the last step, of each of several schedulers, was made.
        until: the stage that the run ends with; ``None`` for the whole run.
        on_recorded: called when there is more to go on from.
        generators: random numbers that the pipeline draws from.
        guidance: components with a state that changes with the steps.
        place: gives a tensor that was on the devices back to them.
        caches: the step cache of the run.
        denoises: whether a call of that name belongs to the stage denoise.
        by_steps: whether a scheduler makes steps.
        unkept: why no run can go on from this one; empty if one can.
    """

    before: Recorded = field(default_factory=Recorded)
    until: StageName | None = None
    on_recorded: Callable[[], None] = lambda: None
    generators: Sequence[torch.Generator] = ()
    guidance: Mapping[str, Any] = field(default_factory=dict)
    place: Place = lambda tensor: tensor
    caches: StepCaches | None = None
    denoises: Callable[[str], bool] = denoises
    by_steps: bool = True
    recorded: Recorded = field(init=False)
    unkept: str = field(default="", init=False)
    _between: bool = False
    _attributes: dict[int, Attributes] = field(default_factory=dict)
    _played_calls: int = 0
    _played_steps: int = 0
    _counts: dict[int, int] = field(default_factory=dict)
    _passes: dict[int, _Pass] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._calls = list(self.before.calls)
        self._steps = list(self.before.steps)
        self._finished = self.before.finished
        self.recorded = self.before

    def record(self) -> None:
        """Let another run go on from here, if no denoiser's answer waits for a step."""
        self._settle()
        if self.live and not self._between and not self.unkept:
            self.recorded = Recorded(
                tuple(self._calls),
                tuple(self._steps),
                self._played_steps,
                self._finished,
                {} if self.caches is None else self.caches.histories,
            )
            self.on_recorded()

    def _settle(self) -> None:
        """Read what the last call answered, once upstream has taken what it needs."""
        if self._calls and self._calls[-1].answer is not None:
            last = self._calls[-1]
            assert last.answer is not None
            if last.answer.later:
                self._calls[-1] = replace(last, answer=last.answer.settled())

    @property
    def live(self) -> bool:
        """Whether all that was recorded has been given back."""
        return self._played_steps >= self.before.stepped and self._played_calls >= len(
            self.before.calls
        )

    def check_end(self, asked: Asked, *, after: bool) -> None:
        """End the run before a call that belongs to the stage after the last.

        Args:
            after: whether the call comes after the steps.

        Raises:
            StageEnd: the stage that the run ends with is over.
        """
        if not self.live:
            return
        encoded = after or self._of_a_step(asked)
        if self._finished is None and encoded:
            self._finished = StageName.ENCODE
        if after:
            self._finished = StageName.DENOISE
        if encoded if self.until == StageName.ENCODE else self.until and after:
            self.record()
            raise StageEnd

    def end(self) -> None:
        """Upstream's code is through: no call belongs to a later stage."""
        if self.until is not None:
            self._finished = self.until
            self.record()

    def call(self, asked: Asked, *, after: bool = False) -> Any:
        """The result of a call.

        Args:
            after: whether the call comes after the steps. It is made again, should
                another pass of steps follow: what it answers is large.

        Raises:
            TapeError: another call was recorded.
        """
        name = asked.name
        number = self._played_calls
        if number < len(self.before.calls):
            self._played_calls += 1
            result = self._again(self.before.calls[number], asked)
            self._count(asked)
            return result
        if not self.live:
            raise TapeError(f"upstream calls {name}, and no such call was recorded")
        if not after or self.recorded.stepped != self._played_steps:
            self.record()
        self._settle()
        earlier = self._random()
        old = self._look(asked)
        result = asked.run()
        now, new = self._random(), self._look(asked)
        answer = None
        # What an encoder keeps is of its own calls, which are all given back.
        if not after and (new.marks == old.marks or not self.denoises(name)):
            by_shape = self.by_steps and _by_shape(asked)
            with contextlib.suppress(KeptError):
                answer = shape_of(result) if by_shape else kept(result)
        given = new.digest(old) if answer is None else 0
        same = all(map(torch.equal, earlier, now))
        self._calls.append(Call(name, answer, given, None if same else kept(now)))
        self._between |= self.by_steps and self._of_a_step(asked)
        self._count(asked)
        return result

    def _count(self, asked: Asked) -> None:
        """Count a call as a step, where no scheduler makes steps."""
        if not self.by_steps and self._of_a_step(asked):
            self._count_step()

    def _count_step(self) -> None:
        self._played_steps += 1
        if self._played_steps == self.before.stepped and self.caches is not None:
            self.caches.histories = dict(self.before.histories)

    def _of_a_step(self, asked: Asked) -> bool:
        """Whether a call is made for each step: of a denoiser, or a controlnet."""
        return self.denoises(asked.name) or _by_shape(asked)

    def _again(self, call: Call, asked: Asked) -> Any:
        if call.name != asked.name:
            raise TapeError(f"upstream calls {asked.name}, not {call.name} as recorded")
        if call.answer is not None:
            result = call.answer.value(self.place)
        else:
            before = self._look(asked)
            result = asked.run()
            if self._look(asked).digest(before) != call.given:
                raise TapeError(f"{call.name} keeps a state that cannot be made again")
        if call.random is not None:
            self._set_random(call.random)
        return result

    def _look(self, asked: Asked) -> _Look:
        """The tensors in a module's attributes, and in the arguments of a call."""
        number = id(asked.module)
        if number not in self._attributes:
            self._attributes[number] = Attributes(ModuleTree(asked.module))
        try:
            given = tensors_in((asked.args, asked.kwargs))
        except FormError:  # a collection that no program takes
            given = [torch.empty(0)]
        return _Look.at(self._attributes[number].state().tensors, given)

    def step(self, key: int, scheduler: Any, run: Callable[[], Any]) -> Any:
        """The result of a scheduler's step.

        Args:
            key: the number of the scheduler.
            run: makes the step.
        """
        self._settle()
        number = self._counts.get(key, 0)
        self._counts[key] = number + 1
        live = self._played_steps >= self.before.stepped
        self._count_step()
        result = run()
        at = self._pass(key, scheduler)
        if not live:
            found = [
                place
                for place, one in enumerate(self.before.steps)
                if (one.scheduler, one.number) == (key, number)
            ]
            if not found:
                return result
            self._passes[key].at = found[0]
            return self._step_again(self.before.steps[found[0]], scheduler)
        if not self.unkept:
            self._keep_step(key, number, scheduler, result, at)
        self._between = False
        return result

    def _keep_step(
        self, key: int, number: int, scheduler: Any, result: Any, at: int | None
    ) -> None:
        try:
            holders = (scheduler, *self.guidance.values())
            state = kept([_state_of(one) for one in holders], always=True)
            found = kept(result, always=True)
            made = Step(key, number, found, state, kept(self._random()))
        except KeptError as error:
            self.unkept = f"{type(scheduler).__name__} has a state of its own: {error}"
            self.on_recorded()
            return
        if at is None:
            self._passes[key].at = len(self._steps)
            self._steps.append(made)
        else:
            self._steps[at] = made

    def _pass(self, key: int, scheduler: Any) -> int | None:
        """The place of the pass under way; ``None`` if this step begins one."""
        index = getattr(scheduler, "_step_index", None)
        known = self._passes.get(key)
        timesteps = getattr(scheduler, "timesteps", None)
        goes_on = (
            known is not None
            and known.timesteps is timesteps
            and (index is None or known.index is None or index > known.index)
        )
        at = known.at if known is not None and goes_on else None
        self._passes[key] = _Pass(timesteps, index, at)
        return at

    def _step_again(self, step: Step, scheduler: Any) -> Any:
        holders = (scheduler, *self.guidance.values())
        for holder, state in zip(holders, step.state.value(self.place), strict=True):
            _restore(holder, state)
        self._set_random(step.random)
        return step.result.value(self.place)

    def _random(self) -> list[torch.Tensor]:
        """The states of the run's generators, and of torch's own."""
        return [*(one.get_state() for one in self.generators), torch.get_rng_state()]

    def _set_random(self, states: Kept) -> None:
        *given, own = states.value()
        for generator, state in zip(self.generators, given, strict=True):
            generator.set_state(state)
        torch.set_rng_state(own)


def _by_shape(asked: Asked) -> bool:
    """Whether the next result of a step takes the place of all that a call answers.

    A path leads to a part of a denoiser, which upstream may call once.
    """
    takes_time = denoises(asked.name) or is_denoiser(asked.module)
    return takes_time and "." not in asked.name


def _state_of(holder: Any) -> dict[str, Any]:
    return {name: v for name, v in vars(holder).items() if name not in _FIXED}


def _restore(holder: Any, state: Mapping[str, Any]) -> None:
    """Give an object its attributes back; of equal values, those in place stay."""
    inside = vars(holder)
    for name in inside.keys() - state.keys() - _FIXED:
        del inside[name]
    for name, value in state.items():
        if name not in inside or not equal(inside[name], value):
            inside[name] = value
