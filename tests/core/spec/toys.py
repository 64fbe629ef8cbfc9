"""A model with stages of its own, as an installed plugin."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from tpuport import hookspecs, plugins
from tpuport.core.reports import CompileReport, Reporter
from tpuport.plugins import load_plugins

EXAMPLE = Path(__file__).parent / "toy"


@contextlib.contextmanager
def installed_toy() -> Iterator[plugins.Plugin]:
    """``tpuport.load("toy")`` works in this block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        entry = metadata.EntryPoint("toy", "toy_stages", hookspecs.GROUP)
        found = load_plugins([entry])
        patch.setattr(plugins, "installed_plugins", lambda: found)
        yield found["toy"]


class Heard(Reporter):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def compiling(self, stage: str, program: str) -> None:
        self.lines.append(f"compiling {stage}/{program}")

    def compiled(self, report: CompileReport) -> None:
        if report.reasons:
            name = f"{report.stage}/{report.program}"
            self.lines.append(f"recompiling {name}: {'; '.join(report.reasons)}")

    def began(self, what: str) -> None:
        self.lines.append(f"{what} ...")

    def about(self, word: str) -> list[str]:
        """The lines with a word in them."""
        return [line for line in self.lines if word in line]
