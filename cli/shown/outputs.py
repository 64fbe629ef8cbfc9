"""Where the videos of a run go."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpuport.core.files.sealed_json import sidecar_path
from tpuport.core.files.video_file import check_output, output_paths, video_kind
from tpuport.errors import OutputError

if TYPE_CHECKING:
    from tpuport.core.files.video_file import VideoKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """The files, or folders of PNGs, of some videos, found to be writable.

    Attributes:
        asked: what ``--out`` was, or its default.
        kind: of all of them.
        paths: one per video.
    """

    asked: str
    kind: VideoKind
    paths: tuple[Path, ...]


def plan_outputs(out: str, count: int, report: Path | None = None) -> Outputs:
    """Where ``count`` videos go; creates nothing.

    Args:
        report: another file of the run, which must be none of the videos' own.

    Raises:
        OutputError: the type is unknown, or a place cannot be written.
    """
    if not out:
        raise OutputError("--out is empty; give a file such as video.mp4, or a folder")
    kind = video_kind(out)
    paths = []
    for path in output_paths(out, count):
        # "." and ".." have no name that a sidecar's name could be made from.
        path = path.resolve() if path.name in ("", "..") else path
        if not path.name:
            raise OutputError(f"{out}: cannot be the folder of a video")
        check_output(f"{path}/" if kind == "png" else path)
        own = {path.absolute(), sidecar_path(path).absolute()}
        if report is not None and report.absolute() in own:
            raise OutputError(f"--report {report}: is a file of the video {path}")
        paths.append(path)
    return Outputs(asked=out, kind=kind, paths=tuple(paths))


def default_out(model: str, variant: str, seeds: tuple[int, ...]) -> str:
    """The name in the current folder when ``--out`` is not given."""
    seed = f"-seed{seeds[0]}" if len(set(seeds)) == 1 else ""
    return f"{model}-{variant}{seed}.mp4"
