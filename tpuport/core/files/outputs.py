"""The videos of a run: where they go, and how each gets its name and its sidecar."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.core.files.atomic import cannot_write, flush, replacing
from tpuport.core.files.sealed_json import sidecar_bytes, sidecar_path
from tpuport.core.files.video_file import (
    VideoKind,
    VideoWriter,
    check_output,
    free_output,
    numbered,
    output_of,
)
from tpuport.errors import OutputError

if TYPE_CHECKING:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """The files, or folders of PNGs, of some videos, found to be writable.

    Attributes:
        asked: what ``--out`` was, or its default.
        kind: of all of them.
        wanted: one path per video.
        paths: those that are free; see
            :func:`~tpuport.core.files.video_file.free_output`.
        overwrite: take the place of a video that is there.
    """

    asked: str
    kind: VideoKind
    wanted: tuple[Path, ...]
    paths: tuple[Path, ...]
    overwrite: bool

    def remarks(self) -> list[str]:
        """A line for each video that will not have the name asked for."""
        why = "which is kept" if self.kind == "png" else "--overwrite replaces it"
        return [
            f"{wanted} is there ({why}): the video goes to {path}"
            for wanted, path in zip(self.wanted, self.paths, strict=True)
            if wanted != path
        ]


def plan_outputs(
    out: str | Path,
    count: int,
    *,
    inputs: Sequence[Path] = (),
    overwrite: bool = False,
    report: Path | None = None,
) -> Outputs:
    """Where ``count`` videos go; creates nothing.

    Args:
        inputs: files and folders that the run reads, which no video may replace.
        overwrite: see :class:`Outputs`.
        report: another file of the run, which must be none of the videos' own.

    Raises:
        OutputError: the type is unknown, a place cannot be written, or is an input.
    """
    path, kind = output_of(out)
    wanted = numbered(path, kind, count)
    for one in wanted:
        check_output(one, kind)
        for own in (one, sidecar_path(one)):
            check_no_input(own, inputs, "--out")
    paths = [free_output(one, kind, overwrite=overwrite) for one in wanted]
    for one in paths:
        if report is not None and _same(report, one, sidecar_path(one)):
            raise OutputError(f"--report {report}: is a file of the video {one}")
    return Outputs(
        asked=str(out),
        kind=kind,
        wanted=tuple(wanted),
        paths=tuple(paths),
        overwrite=overwrite,
    )


def check_no_input(path: Path, inputs: Sequence[Path], flag: str) -> None:
    """Refuse an output that is an input, holds one, or is there in the folder of one.

    Raises:
        OutputError: it is; with the input.
    """
    for one in inputs:
        inside = path.exists() and one.resolve() in path.resolve().parents
        if inside or _same(path, one, *one.resolve().parents):
            raise OutputError(
                f"{flag} {path}: is, holds or lies in {one}, which the run reads; "
                "choose another name"
            )


def _same(path: Path, *others: Path) -> bool:
    """Whether a path is one of some others, also by another name."""
    return any(
        path.resolve() == other.resolve()
        or (path.exists() and other.exists() and path.samefile(other))
        for other in others
    )


@dataclass(frozen=True, kw_only=True)
class Video:
    """A video that was written, and the JSON beside it."""

    path: Path
    sidecar: Path
    data: Mapping[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready, for ``--json``."""
        request, index = self.data["request"], self.data["video"]
        return {
            "path": str(self.path),
            "sidecar": str(self.sidecar),
            "prompt": request["prompts"][index],
            "negative_prompt": request["negative_prompts"][index],
            "seed": request["seeds"][0][index % len(request["seeds"][0])],
            "frames_sha256": self.data["frames_sha256"],
        }


class VideoFiles:
    """One writer for each video; none has its name before all are complete.

    Used in a ``with`` block, which discards what :meth:`publish` has not named.

    Args:
        outputs: where they go.
        fps: frames per second.
    """

    def __init__(self, outputs: Outputs, fps: float) -> None:
        self.outputs = outputs
        self.writers = [VideoWriter(path, outputs.kind, fps) for path in outputs.wanted]

    def __enter__(self) -> VideoFiles:
        return self

    def __exit__(self, *error: object) -> None:
        # Without effect on those that were published. Last the first one, which made
        # the folders that they share.
        for writer in reversed(self.writers):
            writer.discard()

    def publish(
        self, describe: Callable[[int, dict[str, Any]], Mapping[str, Any]]
    ) -> list[Video]:
        """Give every video its name and its sidecar.

        At no time a video lies beside the sidecar of another one.

        Args:
            describe: from the index of a video, and ``file``, ``kind``, ``sha256`` and
                ``bytes`` of what was written, to what its sidecar says.

        Raises:
            OutputError: a file cannot be written.
        """
        made: list[Video] = []
        while len(made) < len(self.writers):
            # Another process may take a name between the look and the rename.
            with contextlib.suppress(FileExistsError):
                made.append(self._publish(len(made), describe))
        return made

    def _publish(
        self, index: int, describe: Callable[[int, dict[str, Any]], Mapping[str, Any]]
    ) -> Video:
        writer, kind = self.writers[index], self.outputs.kind
        replace = self.outputs.overwrite or kind == "png"
        path = free_output(writer.path, kind, overwrite=self.outputs.overwrite)
        sha256, size = writer.digest
        output = {"file": path.name, "kind": kind, "sha256": sha256, "bytes": size}
        data = describe(index, output)
        sidecar = sidecar_path(path)
        try:
            with replacing(sidecar) as temporary:
                temporary.write_bytes(sidecar_bytes(data))
                flush(temporary)
                if replace:
                    sidecar.unlink(missing_ok=True)
                # Killed from here on, the video has its own sidecar or none.
                writer.publish(path, replace=replace)
        except FileExistsError:
            raise
        except OSError as error:
            raise cannot_write(sidecar, error) from error
        return Video(path=path, sidecar=sidecar, data=data)
