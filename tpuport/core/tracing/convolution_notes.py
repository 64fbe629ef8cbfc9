"""How convolutions ran, and why a kernel of the project was passed over.

A kernel that refuses a call raises NotImplementedError, and the next implementation
takes over. Tracing notes each refusal in the kernel's own words, for reports of runs
and plans.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from tpuport.core.tracing.context import ConvolutionRecord

if TYPE_CHECKING:
    from tpuport.core.tracing.context import OpContext


def note(
    context: OpContext,
    implementation: str,
    reason: str = "",
    *,
    call: str = "convolution",
) -> None:
    """Add the note of one call to the context."""
    context.convolutions.append(
        ConvolutionRecord(call=call, implementation=implementation, reason=reason)
    )


def passed_over(
    context: OpContext, known: int, call: str, instead: str, why: NotImplementedError
) -> None:
    """Note that ``instead`` takes over a call, and forget what the attempt noted.

    ``known`` is the number of notes before the attempt: what a refused attempt traced
    is no part of the program.
    """
    del context.convolutions[known:]
    note(context, instead, str(why), call=call)


def counted(records: Iterable[ConvolutionRecord]) -> tuple[ConvolutionRecord, ...]:
    """One record for all calls of a kind with one implementation and reason."""
    counts: dict[ConvolutionRecord, int] = {}
    for record in records:
        kind = replace(record, count=1)
        counts[kind] = counts.get(kind, 0) + record.count
    return tuple(replace(kind, count=count) for kind, count in counts.items())
