"""Where the files of a command go, and what they must not replace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.output import is_report
from tpuport.core.files.folders import check_folder
from tpuport.core.files.outputs import Outputs, check_no_input, plan_outputs
from tpuport.errors import UsageError


def check_report(file: Path, inputs: Sequence[Path]) -> None:
    """Refuse a file for --report that cannot be written; creates nothing.

    Args:
        inputs: the files that the command reads.

    Raises:
        UsageError: it is a folder, an input or a file that is no report, or its folder
            cannot be one or may not be written.
    """
    if file.is_dir():
        raise UsageError(f"--report {file}: is a folder; name a file")
    check_folder("--report", file.parent)
    check_no_input(file, inputs, "--report")
    if file.is_file() and not is_report(file):
        raise UsageError(f"--report {file}: is there, and no report; name another file")


def outputs_of(
    settings: Settings, default: str, count: int, *, inputs: Sequence[Path] = ()
) -> Outputs:
    """Where the videos of a command go; creates nothing.

    Args:
        default: the place without --out.
        inputs: that the command reads, beside those of the settings.

    Raises:
        OutputError: a place is no place for a video, or is an input.
    """
    return plan_outputs(
        default if settings.out is None else settings.out,
        count,
        inputs=[*settings.inputs(), *inputs],
        overwrite=settings.overwrite,
        report=settings.report,
    )
