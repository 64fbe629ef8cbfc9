"""The calls of a port's modules and schedulers, and who answers them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tpuport.core.reports import CompileReport, Reporter


@dataclass(frozen=True, slots=True)
class Called:
    """One call of a module by upstream's code.

    Attributes:
        name: of the module: its component, and the path within.
        started: on the clock of :func:`time.perf_counter`.
        seconds: until the result was there; a denoiser's, until the call was made.
        compiled: the program that was made for the call; ``None`` if there was one.
    """

    name: str
    started: float
    seconds: float
    compiled: CompileReport | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """A call that upstream's pipeline makes.

    Attributes:
        name: the component, and the path or the method within.
        module: what is called.
        args, kwargs: of the call.
        answer: makes the call.
    """

    name: str
    module: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    answer: Callable[..., Any]

    def run(self) -> Any:
        """The result."""
        return self.answer(*self.args, **self.kwargs)


class Between:
    """What computes between the calls of modules: the host, at once."""

    def compute(self, *, everything: bool = True) -> None:
        """Compute what was recorded; not everything: what waits for no call."""

    def step(self) -> Callable[[], None] | None:
        """A scheduler's step ended; gives what waits for a result that is not there."""
        return None

    def of_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that was on the devices when it was recorded on a tape."""
        return tensor


class Journal:
    """The last calls of a port, who is told of them, and who answers them.

    Attributes:
        between: computes between the calls.
        on_call: told the name of what upstream's pipeline is about to call.
        answer: gives the result of a call; by default, by running the call.
        on_step: gives the result of a scheduler's step, of the scheduler and what makes
            the step; by default the step is made, and programs end where the step ends.
        on_answer: told the result of each call.
        on_result: told the scheduler and the result of each step.
        ran: the last program that ran, compiled.
        op_by_op: whether programs run op by op, to debug.
    """

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.calls: deque[Called] = deque(maxlen=1 << 16)
        self.on_call: Callable[[str], None] = lambda name: None
        self.answer: Callable[[Asked], Any] = Asked.run
        self.on_step: Callable[[Any, Callable[[], Any]], Any] | None = None
        self.on_answer: Callable[[Asked, Any], None] = lambda asked, answer: None
        self.on_result: Callable[[Any, Any], None] = lambda scheduler, result: None
        self.ran: Any = None
        self.op_by_op = False
        self.between = Between()
        self._inside = False
        self._noticed: set[str] = set()
        self._store_failed = False

    def notice(self, text: str) -> None:
        """Tell something once."""
        if text not in self._noticed:
            self._noticed.add(text)
            self.reporter.say(text)

    def compiled(self, report: CompileReport) -> None:
        """Tell of a program, and once of what could not be kept."""
        self.reporter.compiled(report)
        if report.remark and not self._store_failed:
            self._store_failed = True
            self.reporter.say(f"{report.remark}. What the store refuses is compiled")

    def step(self, scheduler: Any, run: Callable[[], Any]) -> Any:
        """The result of a scheduler's step, which ``run`` makes."""
        if self.on_step is not None:
            result = self.on_step(scheduler, run)
        else:
            result = run()
            self.between.compute()
        self.on_result(scheduler, result)
        return result

    def call(self, asked: Asked) -> Any:
        """The result of a call.

        A call by a component's own code is a part of the call that led there.
        """
        if self._inside:
            return asked.run()
        self._inside = True
        try:
            self.on_call(asked.name)
            # Also before a call that a tape answers: programs begin and end where they
            # do in a run from the beginning.
            self.between.compute(everything=False)
            answer = self.answer(asked)
            self.on_answer(asked, answer)
            return answer
        finally:
            self._inside = False
