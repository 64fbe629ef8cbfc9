"""What convolutions ran as, and why a kernel of the project was passed over.

A kernel that cannot do a call raises NotImplementedError, and the next implementation
takes over. Each such step is noted where programs are traced, with the kernel's own
words, so that reports of runs and plans can tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpuport.core.ops import OpContext


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionRecord:
    """What some traced calls run as.

    Attributes:
        call: what they are, such as ``"convolution"``; a block that holds several is
            noted only where it was refused as a whole, and its convolutions by
            themselves.
        implementation: what does them.
        reason: why what is better was passed over; empty where nothing was.
        count: how many there are, as traced: one in a scanned block counts once.
    """

    call: str
    implementation: str
    reason: str = ""
    count: int = 1

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


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


def words(entry: Mapping[str, Any]) -> str:
    """One record for people: how many of what, by what, and why."""
    count, call = entry["count"], entry["call"]
    text = f"{count} {call}{'s' * (count > 1)} by {entry['implementation']}"
    return text + (f": {entry['reason']}" if entry["reason"] else "")
