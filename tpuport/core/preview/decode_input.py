"""From the latents of a step to what the autoencoder is given to decode.

Upstream's code between the last step and ``decode`` unpacks, turns and scales latents.
It runs once ahead, after the first step: a copy of the pipeline is called again, no
module computes, and steps end at once. The operators after the last step are noted, and
made again with the latents of any step.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tpuport.core.drive.kept_values import Kept, KeptError, kept, shape_of
from tpuport.core.enums import denoises
from tpuport.core.files.atomic import one_line
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.core.seam.journal import Asked, Journal
from tpuport.core.seam.values import tensors_in
from tpuport.errors import TpuportError

#: In place of the names of denoisers.
_STEP = "a denoiser"
#: Keywords of a call that are not for a call ahead.
_CALLBACKS = ("callback", "callback_on_step_end")


class NoPreviewError(TpuportError):
    """Latents of a pipeline cannot be shown."""


class _DecodeReached(BaseException):
    """Ends the call ahead."""


class _Operators(TorchDispatchMode):
    """Notes the operators that come after a step, to make them again."""

    def __init__(self) -> None:
        super().__init__()
        self.begin(torch.empty(0))

    def begin(self, latents: torch.Tensor) -> None:
        """Forget what was noted, and note what follows on these latents."""
        self.latents = latents
        self._noted: list[tuple[Any, Any, Any, Any]] = []
        self._known = {_memory(latents)}

    def knows(self, value: Any) -> bool:
        """Whether a tensor in ``value`` is computed from the latents."""
        return any(_memory(one) in self._known for one in _tensors(value))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.knows((args, kwargs)):
            result = func(*args, **kwargs)
        else:
            written = args[:1] if func._schema.is_mutable else ()
            if written and not self.knows(written):
                # In the place of a part of another tensor, as that part was before.
                before = written[0].clone()
                self._noted.append((torch.Tensor.copy_, (*written, before), {}, ()))
            result = func(*args, **kwargs)
            self._known |= {_memory(one) for one in _tensors((result, written))}
        self._noted.append((func, args, kwargs, result))
        return result

    def settle(self) -> None:
        """Keep of what was noted what the latents, or where they went, are part of."""
        self._noted = [one for one in self._noted if self.knows(one[1:])]

    def again(self, latents: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """``wanted``, computed from other latents."""
        found = {id(self.latents): latents.clone()}

        def put(tensor: torch.Tensor) -> torch.Tensor:
            return found.get(id(tensor), tensor)

        for func, args, kwargs, result in self._noted:
            args, kwargs = tree_map_only(torch.Tensor, put, (args, kwargs))
            made = func(*args, **kwargs)
            pairs = zip(_tensors(result), _tensors(made), strict=False)
            found |= {id(old): new for old, new in pairs}
        return found[id(wanted)]


def _tensors(value: Any) -> list[torch.Tensor]:
    return [one for one in tree_leaves(value) if isinstance(one, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    """A number for the memory of a tensor, which views share."""
    if isinstance(tensor, DeviceTensor):  # without memory
        return id(tensor)
    return tensor.untyped_storage()._cdata


@dataclass(frozen=True, kw_only=True)
class DecodeInput:
    """What the autoencoder is given, for the latents of any step.

    Attributes:
        name: of the autoencoder.
        module: the autoencoder, until colours are there.
        args, kwargs: of the first call of ``decode``.
        latents: among these, what is decoded, for latents of zeros.
    """

    name: str
    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    latents: torch.Tensor
    _operators: _Operators

    def of(self, latents: torch.Tensor) -> torch.Tensor:
        """What ``decode`` is given for latents of a step.

        Args:
            latents: on the host, of the shape that the step gives.

        Raises:
            NoPreviewError: they have another shape.
        """
        expected = self._operators.latents.shape
        if latents.shape != expected:
            raise NoPreviewError(
                f"latents {list(latents.shape)} are not what a step gives, "
                f"{list(expected)}"
            )
        with torch.no_grad():
            return self._operators.again(latents, self.latents)

    def alone(self) -> DecodeInput:
        """Without the autoencoder, which only the fit needs."""
        return replace(self, module=None, args=(), kwargs={})

    def decoded(self, module: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        """What a twin of the autoencoder decodes from latents of any size."""

        def put(tensor: torch.Tensor) -> torch.Tensor:
            if tensor is self.latents:
                return latents
            return tensor.float() if tensor.is_floating_point() else tensor

        given = tree_map_only(torch.Tensor, put, (self.args, dict(self.kwargs)))
        result: torch.Tensor = tensors_in(module.decode(*given[0], **given[1]))[0]
        return result


class FirstStep:
    """What a pipeline's modules answer up to the end of the first step.

    Args:
        pipeline: about to be called.
        arguments: of the call.
        journal: hears of the calls.
    """

    def __init__(
        self, pipeline: Any, arguments: Mapping[str, Any], journal: Journal
    ) -> None:
        self.scheduler = pipeline.components.get("scheduler")
        self._pipeline, self._journal = pipeline, journal
        self._arguments = {
            name: value.clone() if isinstance(value, torch.Tensor) else value
            for name, value in arguments.items()
            if name not in _CALLBACKS
        }
        self._draws = [one.clone_state() for one in _generators(arguments)]
        self._answers: dict[str, list[Kept]] = defaultdict(list)
        self._result: Kept | None = None

    @property
    def over(self) -> bool:
        """Whether the first step was heard."""
        return self._result is not None

    def answered(self, asked: Asked, answer: Any) -> None:
        """Note what a module answered; of a denoiser, the shape."""
        if self._result is not None:
            return
        with contextlib.suppress(KeptError):  # whoever needs it misses it
            # Each step calls its denoisers alike, whichever they are.
            named, keep = (
                (_STEP, shape_of) if denoises(asked.name) else (asked.name, kept)
            )
            self._answers[named].append(keep(answer))

    def stepped(self, result: Any) -> None:
        """Note the shape of what the scheduler's step gave."""
        with contextlib.suppress(KeptError):
            self._result = shape_of(result)

    def forget(self) -> None:
        """Keep the pipeline and what its modules answered no longer."""
        self._pipeline, self._arguments = None, {}
        self._answers.clear()

    def decode_input(self) -> DecodeInput:
        """Call the pipeline ahead, from within its own call.

        Raises:
            NoPreviewError: nothing is decoded, or not from a step's latents.
        """
        form, journal = self._result, self._journal
        if form is None or not self._answers[_STEP]:
            raise NoPreviewError("no step was heard that a denoiser went before")
        ahead = _Ahead(self, copied := _copy(self._pipeline), form)
        before = journal.answer, journal.on_step, journal.on_answer, journal.on_result
        journal.answer, journal.on_step = ahead.answer, ahead.step
        journal.on_answer, journal.on_result = _unheard, _unheard
        try:
            with torch.random.fork_rng(devices=[]), ahead.operators:
                copied(**self._own_arguments())
        except _DecodeReached:
            assert ahead.found is not None
            return ahead.found
        except NoPreviewError:
            raise
        except Exception as error:  # of upstream's code, which got made-up numbers
            raise NoPreviewError(f"the call ahead failed: {one_line(error)}") from error
        finally:
            journal.answer, journal.on_step = before[:2]
            journal.on_answer, journal.on_result = before[2:]
        raise NoPreviewError("upstream decodes nothing after the steps")

    def _own_arguments(self) -> dict[str, Any]:
        """The arguments, with generators of their own as they were before the call."""
        given, draws = dict(self._arguments), [g.clone_state() for g in self._draws]
        for name, value in given.items():
            if isinstance(value, torch.Generator):
                given[name] = draws.pop(0)
            elif isinstance(value, list) and _generators({name: value}):
                given[name] = [draws.pop(0) for _ in value]
        return given

    def answer(self, name: str, number: int) -> Any:
        """What a module answered at a call; at later calls, what it did at the last."""
        answers = self._answers[name]
        if not answers:
            raise NoPreviewError(f"{name} comes between the steps and decode")
        if name == _STEP:
            return answers[number % len(answers)].value()
        return answers[min(number, len(answers) - 1)].value()


class _Ahead:
    """Answers the calls of a pipeline that is called ahead."""

    def __init__(self, heard: FirstStep, pipeline: Any, form: Kept) -> None:
        self.operators = _Operators()
        self.found: DecodeInput | None = None
        self._heard, self._form = heard, form
        self._scheduler = pipeline.components["scheduler"]
        self._calls: Counter[str] = Counter()
        self._steps = 0
        self._timesteps: Any = ()

    def step(self, scheduler: Any, run: Any) -> Any:
        """Zeros in the form of a step's result; of other schedulers the result."""
        if scheduler is not self._scheduler:
            return run()
        timesteps = scheduler.timesteps
        another = timesteps is not self._timesteps or self._steps == len(timesteps)
        if self._steps and another:
            raise NoPreviewError("steps are made in several passes before decode")
        self._timesteps = timesteps
        result = self._form.value()
        self.operators.begin(tensors_in(result)[0])
        self._calls[_STEP] = 0
        self._steps += 1
        return result

    def answer(self, asked: Asked) -> Any:
        """What was heard, or its form; ends at a call that decodes the latents."""
        name, _, method = asked.name.rpartition(".")
        given = tensors_in((asked.args, asked.kwargs)) if self._steps else []
        latents = [one for one in given if self.operators.knows(one)]
        if method == "decode" and latents:
            self.found = DecodeInput(
                name=name,
                module=asked.module,
                args=asked.args,
                kwargs=asked.kwargs,
                latents=latents[0],
                _operators=self.operators,
            )
            self.operators.settle()
            raise _DecodeReached
        called = _STEP if denoises(asked.name) else asked.name
        self._calls[called] += 1
        return self._heard.answer(called, self._calls[called] - 1)


def _unheard(*args: Any) -> None:
    pass


def _copy(pipeline: Any) -> Any:
    """The pipeline with a scheduler and guidance of its own, and the same modules."""
    made = object.__new__(type(pipeline))
    made.__dict__.update(vars(pipeline))
    for name, part in pipeline.components.items():
        if hasattr(part, "set_timesteps") or name.startswith("guider"):
            made.__dict__[name] = copy.deepcopy(part)
    if hasattr(made, "set_progress_bar_config"):
        made.set_progress_bar_config(disable=True)
    return made


def _generators(arguments: Mapping[str, Any]) -> list[torch.Generator]:
    """The random numbers that a call draws from, in order."""
    found: list[torch.Generator] = []
    for value in arguments.values():
        given = value if isinstance(value, list) else [value]
        if given and all(isinstance(one, torch.Generator) for one in given):
            found += given
    return found
