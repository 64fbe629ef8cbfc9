"""``tpuport replay``: the video of a sidecar made again, and whether it is the same."""

from __future__ import annotations

import time
from pathlib import Path

import typer

from tpuport.cli.asked.environment import prepare, running
from tpuport.cli.asked.first import check_read, check_written
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.output import give_out, say
from tpuport.core.files.sealed_json import read_sidecar, sidecar_path
from tpuport.core.files.sources import here
from tpuport.errors import MissingArtifactError, ReplayError, UsageError


@command(
    "replay",
    file=typer.Argument(metavar="FILE", help="A video, or the JSON file beside it."),
)
def replay(settings: Settings, file: str) -> None:
    """Make a recorded video again, and compare the frames.

    All settings come from the JSON. The frames must be the same bit for bit. With --out
    the video is written too.

    Example: tpuport replay panda.mp4.json
    """
    started = time.perf_counter()
    prepare(debug=settings.debug)
    sidecar = _sidecar_of(Path(here(file)).expanduser())
    read_sidecar(sidecar)  # refused before torch is imported, as all of these
    check_read(settings)
    check_written(settings, 1, [sidecar, sidecar.with_suffix("")])
    with running(settings) as display:
        from tpuport.cli.runs.replayed import replayed

        document = replayed(sidecar, settings, display, started=started)
    if not document["same"]:
        give_out(document, as_json=False, report=settings.report)
        raise ReplayError(
            f"{sidecar}: the frames are not the recorded ones: recorded "
            f"{document['recorded_sha256']}, now {document['frames_sha256']}; "
            f"{document['changes']}"
        )
    say(f"the same frames as {sidecar}: {document['frames_sha256']}")
    give_out(document, as_json=settings.json, report=settings.report)


def _sidecar_of(path: Path) -> Path:
    """The sidecar that was named, or the one of the video that was."""
    if path.is_symlink() and not sidecar_path(path).exists():
        path = path.resolve()
    is_video = path.suffix not in ("", ".json")
    if is_video and not path.exists() and not sidecar_path(path).exists():
        raise MissingArtifactError(
            f"{path} does not exist; name a video, its folder or its JSON"
        )
    if not path.resolve().name:
        raise UsageError(f"{path}: names no video, nor its JSON")
    if path.is_dir():
        return sidecar_path(path.resolve())
    if path.suffix == ".json":
        return path
    return sidecar_path(path if path.suffix else path.with_name(f"{path.name}.mp4"))
