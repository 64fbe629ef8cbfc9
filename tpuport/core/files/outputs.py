"""The videos of a run: where they go, and how each gets its name and its sidecar."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpuport.core.files.atomic import cannot_write, flush, replacing
from tpuport.core.files.sealed_json import sidecar_bytes, sidecar_path
from tpuport.core.files.stores import AnyPath, StorePath
from tpuport.core.files.video_file import (
    VideoKind,
    VideoWriter,
    check_output,
    free_output,
    numbered,
    output_of,
)
from tpuport.errors import OutputError


@dataclass(frozen=True, kw_only=True)
class Video:
    """A video that was written, and the JSON beside it."""

    path: AnyPath
    sidecar: AnyPath
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
    wanted: tuple[AnyPath, ...]
    paths: tuple[AnyPath, ...]
    overwrite: bool

    def remarks(self) -> list[str]:
        """A line for each video that will not have the name asked for."""
        kept = self.kind == "png" and isinstance(self.wanted[0], Path)
        why = "which is kept" if kept else "--overwrite replaces it"
        return [
            f"{wanted} is there ({why}): the video goes to {path}"
            for wanted, path in zip(self.wanted, self.paths, strict=True)
            if wanted != path
        ]

    @contextlib.contextmanager
    def writers(self, fps: float) -> Iterator[list[VideoWriter]]:
        """A writer for each video; what has no name at the end is discarded.

        Args:
            fps: frames per second.
        """
        made = [VideoWriter(path, self.kind, fps) for path in self.wanted]
        try:
            yield made
        finally:
            # Last the first one, which made the folders that they share.
            for writer in reversed(made):
                writer.discard()

    def publish(
        self,
        writers: Sequence[VideoWriter],
        describe: Callable[[int, dict[str, Any]], Mapping[str, Any]],
    ) -> list[Video]:
        """Give every video, which is written, its name and its sidecar.

        At no time a video lies beside the sidecar of another one.

        Args:
            writers: from :meth:`writers`.
            describe: from the index of a video, and ``file``, ``kind``, ``sha256`` and
                ``bytes`` of what was written, to what its sidecar says.

        Raises:
            OutputError: a file cannot be written.
        """
        made: list[Video] = []
        while len(made) < len(writers):
            index = len(made)
            # Another process may take a name between the look and the rename.
            with contextlib.suppress(FileExistsError):
                of_one = functools.partial(describe, index)
                made.append(self._publish(writers[index], of_one))
        return made

    def _publish(
        self,
        writer: VideoWriter,
        describe: Callable[[dict[str, Any]], Mapping[str, Any]],
    ) -> Video:
        kind, replace = self.kind, self.overwrite or self.kind == "png"
        path = free_output(writer.path, kind, overwrite=self.overwrite)
        sha256, size = writer.digest
        output = {"file": path.name, "kind": kind, "sha256": sha256, "bytes": size}
        data = describe(output)
        sidecar = sidecar_path(path)
        if isinstance(sidecar, StorePath):
            if replace:
                sidecar.remove()
            # Interrupted from here on, the video has its own sidecar or none.
            writer.publish(path, replace=replace)
            sidecar.write_bytes(sidecar_bytes(data))
            return Video(path=path, sidecar=sidecar, data=data)
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


def plan_outputs(
    out: str | Path,
    count: int,
    *,
    inputs: Sequence[Path] = (),
    overwrite: bool = False,
    report: AnyPath | None = None,
) -> Outputs:
    """Where ``count`` videos go; creates nothing.

    Args:
        inputs: files and folders that the run reads, which no video may replace.
        overwrite: see :class:`Outputs`.
        report: another file of the run, which must be none of the videos' own.

    Raises:
        OutputError: the type is unknown, a place cannot be written, or is an input.
        StoreError: a store cannot be written.
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


def check_no_input(path: AnyPath, inputs: Sequence[Path], flag: str) -> None:
    """Refuse an output that is an input, holds one, or is there in the folder of one.

    Raises:
        OutputError: it is; with the input.
    """
    if isinstance(path, StorePath):
        return  # inputs are files of this machine
    for one in inputs:
        inside = path.exists() and one.resolve() in path.resolve().parents
        if inside or _same(path, one, *one.resolve().parents):
            raise OutputError(
                f"{flag} {path}: is, holds or lies in {one}, which the run reads; "
                "choose another name"
            )


def _same(path: AnyPath, *others: AnyPath) -> bool:
    """Whether a path is one of some others, also by another name."""
    if isinstance(path, StorePath):
        return path in others
    return any(
        path.resolve() == other.resolve()
        or (path.exists() and other.exists() and path.samefile(other))
        for other in others
        if isinstance(other, Path)
    )
