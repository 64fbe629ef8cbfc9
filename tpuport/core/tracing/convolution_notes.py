"""What convolutions ran as, and why a kernel of the project was passed over.

A kernel that cannot do a call raises NotImplementedError, and the next implementation
takes over. Each such step is noted where programs are traced, with the kernel's own
words, so that reports of runs and plans can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

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
    """Add one call to what the context knows."""
    context.convolutions.append(
        ConvolutionRecord(call=call, implementation=implementation, reason=reason)
    )


def passed_over(
    context: OpContext, known: int, call: str, instead: str, why: NotImplementedError
) -> None:
    """Note that ``instead`` takes over a call, and forget what the attempt noted.

    Args:
        known: how many calls the context knew before the attempt: what it did before
            it was refused is no part of the program.
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


def joined(entries: Iterable[Mapping[str, Any]]) -> tuple[dict[str, Any], ...]:
    """:func:`counted` of records as :meth:`ConvolutionRecord.as_dict` gives them."""
    found = counted(ConvolutionRecord(**entry) for entry in entries)
    return tuple(record.as_dict() for record in found)
