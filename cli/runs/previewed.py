"""``--preview``: frames of a run, in the terminal or in a file, while steps run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tpuport.cli.shown.pictures import (
    Draw,
    drawing_here,
    picture_of,
    place_of,
    png_of,
    window_here,
)
from tpuport.core.drive.tape import Tape
from tpuport.core.files.atomic import atomic_write_bytes, missing, remove_empty
from tpuport.core.preview.previews import Preview, PreviewsBeside
from tpuport.core.reports import Reporter
from tpuport.core.seam.journal import Journal


@contextlib.contextmanager
def previewed(
    pipeline: Any,
    arguments: Mapping[str, Any],
    journal: Journal,
    *,
    cache: Path,
    files: Sequence[Path],
    reporter: Reporter,
    load: Callable[[str], None],
    tape: Tape | None,
) -> Iterator[None]:
    """Show frames of the call that the block makes.

    Args:
        cache: the cache folder, for the colours of an autoencoder's latents.
        files: of each video of the call, for its frames, where the terminal shows no
            pictures; removed at the end. Videos may share one.
        load: gives a component its weights.
        tape: what it gives back is not shown.
    """
    preview = Preview(pipeline, arguments, journal, cache / "previews")
    draw = drawing_here()
    new = [folder for file in files for folder in missing(file.parent)]
    show: Callable[[np.ndarray], None] = _InFiles(files, reporter)
    if draw is not None:
        show = functools.partial(_in_terminal, draw, reporter)

    def live() -> bool:
        return tape is None or tape.live

    try:
        with PreviewsBeside(preview, show, reporter, load=load, wanted=live):
            yield
    finally:
        if draw is None:
            for file in files:
                file.unlink(missing_ok=True)
            remove_empty(new)


def _in_terminal(draw: Draw, reporter: Reporter, frames: np.ndarray) -> None:
    picture = picture_of(frames)
    place = place_of(picture, window_here())
    reporter.picture(draw(picture, place), place.rows)


class _InFiles:
    """Puts each picture in the place of the one before."""

    def __init__(self, files: Sequence[Path], reporter: Reporter) -> None:
        self._files, self._reporter, self._told = files, reporter, False

    def __call__(self, frames: np.ndarray) -> None:
        parts = np.array_split(frames, len(self._files))
        videos = list(zip(self._files, parts, strict=True))
        for file in dict.fromkeys(self._files):
            own = np.concatenate([part for whose, part in videos if whose == file])
            picture = picture_of(own)
            file.parent.mkdir(parents=True, exist_ok=True)
            atomic_write_bytes(file, png_of(picture))
        if not self._told:
            self._told = True
            self._reporter.say(f"preview: {self._files[0]}")


def preview_file(video: Path) -> Path:
    """A free name for previews beside a video: ``fox.preview.png`` for ``fox.mp4``."""
    number = 1
    while (file := video.with_name(f"{video.stem}.preview{_of(number)}.png")).exists():
        number += 1
    return file


def _of(number: int) -> str:
    return "" if number == 1 else f"-{number}"
