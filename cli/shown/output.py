"""What goes to stdout (data) and to stderr (everything for people)."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tpuport.cli.shown.tables import columns
from tpuport.core.files.atomic import (
    atomic_write_json,
    cannot_write,
    json_bytes,
    missing,
    remove_empty,
)
from tpuport.core.files.folders import check_folder
from tpuport.core.files.outputs import check_no_input
from tpuport.core.files.stores import AnyPath, StorePath
from tpuport.core.reports import RunReport, memory_sources, memory_table
from tpuport.errors import UsageError

#: Takes the place of :func:`say` while many runs are made.
_teller: Callable[[str], None] | None = None


@contextlib.contextmanager
def told(tell: Callable[[str], None]) -> Iterator[None]:
    """Give ``tell`` the lines for people while the block lasts."""
    global _teller
    before, _teller = _teller, tell
    try:
        yield
    finally:
        _teller = before


def say(text: str) -> None:
    """A line for people, on stderr; without one, or a reader, for nobody."""
    if _teller is not None:
        _teller(text)
        return
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr or io.StringIO(), flush=True)


#: How the document of every command begins.
_BEGINNING = b'{\n  "command": "'


def _is_report(file: AnyPath) -> bool:
    """Whether a file is empty or a document of a command, which another may replace."""
    if isinstance(file, StorePath):
        return file.read_bytes()[: len(_BEGINNING)] in (b"", _BEGINNING)
    with file.open("rb") as opened:
        return opened.read(len(_BEGINNING)) in (b"", _BEGINNING)


def check_report(file: AnyPath, inputs: Sequence[Path]) -> None:
    """Refuse a file for --report that cannot be written; creates nothing.

    Args:
        inputs: the files that the command reads.
    """
    if isinstance(file, StorePath):
        if not file.name:
            raise UsageError(f"--report {file}: is a bucket; name a file")
        file.parent.check_writable()
        if file.exists() and not _is_report(file):
            raise UsageError(
                f"--report {file}: is there, and no report; name another file"
            )
        return
    if file.is_dir():
        raise UsageError(f"--report {file}: is a folder; name a file")
    check_folder("--report", file.parent)
    check_no_input(file, inputs, "--report")
    if file.is_file() and not _is_report(file):
        raise UsageError(f"--report {file}: is there, and no report; name another file")


def give_out(
    document: Any,
    *,
    as_json: bool,
    text: Iterable[str] = (),
    report: AnyPath | None = None,
) -> None:
    """What a command has found, on stdout: its one JSON document, or lines of text.

    Args:
        report: a file that gets the document too.
    """
    if as_json:
        print(json.dumps(document, indent=2, ensure_ascii=False))
    else:
        for line in text:
            print(line)
    if isinstance(report, StorePath):
        report.write_bytes(json_bytes(report, document))
        say(f"wrote {report}")
    elif report is not None:
        new = missing(report.parent)
        try:
            report.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_json(report, document)
        except OSError as error:
            raise cannot_write(report, error) from error
        finally:
            remove_empty(new)
        say(f"wrote {report}")


def show_results(
    document: Any,
    report: RunReport,
    written: Iterable[AnyPath],
    *,
    as_json: bool,
    file: AnyPath | None,
) -> None:
    """The end of a run: the summary, its document, the files that were written.

    Where the videos are comes last, also where the document cannot be written.
    """
    print_summary(report)
    try:
        give_out(document, as_json=as_json, report=file)
    finally:
        for path in written:
            say(f"wrote {path}")


def print_summary(report: RunReport) -> None:
    """How long a run took, and the table of memory where one was asked for."""
    stages = [(s.stage, s.unit, s.memory) for s in report.stages if s.memory]
    if stages:
        rows = columns(memory_table(stages), indent="  ")
        for line in [*rows, *(f"  {line}" for line in memory_sources(stages)), ""]:
            say(line)
    for line in columns(report.summary(), indent="  "):
        say(line)
