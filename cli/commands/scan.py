"""``tpuport scan``: what in a source does not port, found by reading it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import print_json
from tpuport.core.plan.source_scan import Finding, by_kind, scan, sources_in
from tpuport.core.reports import plural
from tpuport.core.run.progress import Display
from tpuport.core.spec.model_port import BLOCKS, with_blocks
from tpuport.plugins import model_plugins, ports


@command("scan")
def scan_(
    settings: Settings,
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A Python file, or a folder.")
    ],
) -> None:
    """Say what in a source does not port: file, line, remedy.

    CUDA, kernels of its own, values that a forward reads, and the like. Nothing of the
    source is imported or run. If a patch of tpuport covers the function, the line names
    the patch. Host code between two modules is looked at for CUDA alone.

    Example: tpuport scan my_model/
    """
    prepare(debug=settings.debug)
    files = sources_in(Path(path).expanduser())
    with (
        Display() as display,
        display.timed("looking at the patches"),
        signals.starting(before="\n"),
    ):
        patches = _patches()
    found = [finding for file in files for finding in scan(file, patches)]
    left = [one for one in found if not one.patch]
    if settings.json:
        print_json(
            {
                "files": len(files),
                "findings": [one.as_dict() for one in found],
                "kinds": by_kind(found),
                "covered": len(found) - len(left),
            }
        )
        return
    for one in found:
        print(_line(one))
    covered = f", {len(found) - len(left)} covered by a patch" if found else ""
    print(f"{plural(len(files), 'file')}: {plural(len(found), 'finding')}{covered}")


def _line(one: Finding) -> str:
    how = f"covered by the patch {one.patch}" if one.patch else one.remedy
    return f"{one.file}:{one.line}: {one.kind}: {one.code}\n    {how}"


def _patches() -> dict[str, str]:
    """The target of every patch that some port has -> the patch's name."""
    from tpuport.patches.standard import PATCHES

    found = {patch.target: patch.name for patch in PATCHES}
    for plugin in model_plugins():
        for blocks in reversed(BLOCKS):
            found |= {p.target: p.name for p in plugin.patches_with(blocks)}
    for form in (form for port in ports() for form in port.all_forms):
        for blocks in reversed(BLOCKS):
            found |= {p.target: p.name for p in with_blocks(form, blocks).patches}
    return found
