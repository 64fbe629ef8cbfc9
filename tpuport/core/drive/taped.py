"""One call of a pipeline on a tape: what is on the tape is not done again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tpuport.core.drive.driving import Drive, driving
from tpuport.core.drive.tape import Recorded, StageEnd, Tape
from tpuport.core.enums import Backend, StageName
from tpuport.core.seam.journal import Journal


def tape_of(
    pipeline: Any,
    arguments: Mapping[str, Any],
    before: Recorded,
    until: StageName | None = None,
) -> Tape:
    """The tape of one call.

    Args:
        arguments: of the call; its generators are part of what is kept.
        before: what an earlier run recorded.
        until: the stage to end with.
    """
    given = arguments.get("generator")
    generators = given if isinstance(given, list | tuple) else [given]
    return Tape(
        before,
        until,
        generators=tuple(one for one in generators if one is not None),
        guidance={
            name: component
            for name, component in pipeline.components.items()
            if name.startswith("guider")
        },
    )


def called(
    pipeline: Any,
    arguments: Mapping[str, Any],
    journal: Journal,
    backend: Backend,
    tape: Tape | None = None,
    before_live: Callable[[str], None] = lambda name: None,
    around: Callable[[StageName, str, Callable[[], Any]], Any] | None = None,
) -> tuple[Any, Drive]:
    """What upstream returns, and what happened.

    Args:
        journal: of the pipeline's seam; of one that is not ported, a new one.
        before_live: told the name of a call that is not given back.
        around: makes such a call, to look at it.

    Returns:
        the output; ``None`` if the stage that the tape ends with is over.
    """
    with driving(pipeline, journal, backend, tape) as drive:
        drive.before_live = before_live
        if around is not None:
            drive.around = around
        if tape is not None:
            tape.place = journal.between.of_host
        try:
            output = pipeline(**arguments)
        except StageEnd:
            output = None
    return output, drive
