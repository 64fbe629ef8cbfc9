"""``tpuport new-model``: a package for a pipeline that nobody has a plugin for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.commands.check import prepare_devices
from tpuport.cli.runs.new_package import new_package
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import print_json
from tpuport.core.run.progress import Display


@command("new-model")
def new_model(
    settings: Settings,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What --model takes.")],
    pipeline: Annotated[
        str,
        typer.Option(
            "--class", metavar="CLASS", help="Of diffusers, such as WanPipeline."
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option("--out", metavar="FOLDER", help="A new folder. (default: NAME)"),
    ] = None,
) -> None:
    """Write a package with a plugin for a pipeline class.

    The pipeline is built small and ported: the plugin says which changes to torchax
    and upstream ran. --weights names configs, where those of the class do not do.

    Example: tpuport new-model my-wan --class WanPipeline
    """
    prepare_devices()
    prepare(debug=settings.debug)
    folder = Path(out or name).expanduser()
    with Display(signals.check) as display:
        made = new_package(name, pipeline, folder, settings, display)
    if settings.json:
        print_json({"command": "new-model", **made})
        return
    for file in made["files"]:
        print(folder / file)
    print(
        f"next: pip install -e {folder}, fill in what is marked FILL IN, and "
        f"`tpuport check {name}`"
    )
