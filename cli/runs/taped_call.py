"""One call of a pipeline: with its tape in the run's folder, and looked at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuport.cli.runs.checks import upstreams_errors
from tpuport.core.enums import StageName
from tpuport.core.reports import Reporter, StageReport

if TYPE_CHECKING:
    from tpuport.cli.asked.settings import Settings
    from tpuport.core.drive.pipeline_run import PipelineRun
    from tpuport.core.drive.step_caches import StepCaches
    from tpuport.core.run.inspection import Inspection
    from tpuport.core.seam.journal import Journal


@dataclass(frozen=True)
class TapedCall:
    """One video of a run, and the tape of it in the run's folder.

    Attributes:
        settings, reporter: of the run.
        how: the pipeline is run, as the tape keeps it.
        load: gives a component its weights before it is called.
        caches: the step cache, in place.
        kept: the run's folder; ``None`` to keep nothing.
        index: of the call.
        until: the stage to end with.
        inspection: looks at the calls of modules.
    """

    settings: Settings
    how: dict[str, Any]
    reporter: Reporter
    pipeline: Any
    journal: Journal
    load: Callable[[str], None] = lambda name: None
    caches: StepCaches | None = None
    kept: PipelineRun | None = None
    index: int = 0
    until: StageName | None = None
    inspection: Inspection | None = None

    def called(self, given: dict[str, Any]) -> tuple[Any, list[StageReport]]:
        """What upstream returns, and the reports of the stages that were run."""
        from tpuport.core.drive.checkpoints import Checkpoints
        from tpuport.core.drive.taped import called, tape_of

        name, settings = type(self.pipeline).__name__, self.settings
        with contextlib.ExitStack() as stack:
            tape = checkpoints = None
            if self.kept is not None:
                folder = self.kept.tapes[self.index]
                before = folder.read()
                folder.begin(self.how, before)
                tape = tape_of(self.pipeline, given, before, self.until)
                checkpoints = stack.enter_context(
                    Checkpoints(tape, folder, settings.checkpoint_every, self.reporter)
                )
            try:
                with upstreams_errors(name):
                    output, drive = called(
                        self.pipeline,
                        given,
                        self.journal,
                        settings.backend,
                        tape,
                        self.load,
                        None if self.inspection is None else self.inspection.around,
                        self.caches,
                    )
            except BaseException as error:
                if self.inspection is not None and (text := self.inspection.text()):
                    error.add_note(text)
                raise
            if checkpoints is not None and self.until is not None:
                checkpoints.finish()
        if self.inspection is None:
            return output, drive.reports
        return output, self.inspection.ended(drive.reports)
