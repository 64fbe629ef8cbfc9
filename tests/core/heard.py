"""A reporter that keeps what is said."""

from __future__ import annotations

from tpuport.core.reports import CompileReport, Reporter


class Heard(Reporter):
    """Keeps what is said, and what is reported of programs."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.reports: list[CompileReport] = []

    def say(self, text: str) -> None:
        self.lines.append(text)

    def compiling(self, stage: str, program: str) -> None:
        self.lines.append(f"compiling {stage}/{program}")

    def compiled(self, report: CompileReport) -> None:
        self.reports.append(report)

    def began(self, what: str) -> None:
        self.lines.append(f"{what} ...")

    def about(self, word: str) -> list[str]:
        """The lines with a word in them."""
        return [line for line in self.lines if word in line]
