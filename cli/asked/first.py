"""What is refused before torch and jax are imported: files to read and to write."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from tpuport.cli.asked.noise import check_noise
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.output import check_report
from tpuport.core.enums import Backend, StageName
from tpuport.core.files.folders import check_folder, check_own_folder
from tpuport.core.files.outputs import Outputs, plan_outputs
from tpuport.core.files.sources import check_image, check_video
from tpuport.core.programs.folder_place import read_manifest
from tpuport.core.spec.component import TORCHAX
from tpuport.core.spec.run_settings import DEMO
from tpuport.core.weights.hub import local_folder, read_index
from tpuport.errors import TpuportError, UsageError


def check_run(settings: Settings) -> None:
    """Refuse what :func:`check_read` and :func:`check_written` refuse."""
    check_read(settings)
    check_written(settings, count_of(settings))


def count_of(settings: Settings) -> int:
    """How many videos are asked for."""
    return max(len(settings.prompt), 1) * len(settings.seed)


def check_backend(settings: Settings) -> None:
    """Refuse flags that upstream's own code cannot honour.

    Raises:
        UsageError: which flag.
    """
    given = {
        "--executables": settings.executables is not None,
        "--on-host": bool(settings.on_host),
        "--vae": settings.vae != TORCHAX,
    }
    for flag in (name for name, is_given in given.items() if is_given):
        if settings.backend == Backend.DIFFUSERS:
            raise UsageError(
                f"{flag}: is not for --backend diffusers, which runs upstream's own "
                "code; leave one of them out"
            )


def check_read(settings: Settings, *, opened: bool = True) -> None:
    """Refuse files and folders to read that are not what their flags take.

    What the hub or a store has is not asked for.

    Args:
        opened: whether a video is opened, which takes a process.

    Raises:
        UsageError, ArtifactError, WeightsError: which flag, and what is wrong.
    """
    check_backend(settings)
    if settings.image is not None:
        check_image(settings.image)
    if settings.video is not None:
        check_video(settings.video, opened=opened)
    given = settings.image or settings.video or {"image", "video"} & {*settings.options}
    if settings.strength is not None and not given:
        raise UsageError(
            f"--strength {settings.strength:g}: is for a video to start from; add "
            "--video FILE, or leave the flag out"
        )
    if settings.latents is not None:
        check_noise(settings.latents)
    for choice in settings.lora:
        with _of("--lora"):
            choice.file()
    if isinstance(settings.executables, Path):
        with _of("--executables"):
            read_manifest(settings.executables)
    if settings.weights not in (None, DEMO):
        with _of("--weights"):
            folder = local_folder(settings.weights)
            if folder is not None:
                read_index(folder)


def check_written(settings: Settings, count: int, read: Sequence[Path] = ()) -> None:
    """Refuse places to write to that cannot be written; creates nothing.

    Args:
        count: of the videos.
        read: files that the run reads beside those of the settings.

    Raises:
        UsageError: which flag, and what is wrong.
        StoreError: a store cannot be written.
    """
    if settings.out is not None:
        outputs_of(settings, "", count, read)
    if settings.report is not None:
        check_report(settings.report, [*settings.inputs(), *read])
    if settings.run_dir is not None:
        check_folder("--run-dir", settings.run_dir)
    if settings.profile is None and settings.profile_calls is not None:
        raise UsageError("--profile-calls goes with --profile only; add --profile DIR")
    if settings.profile is not None:
        what = "is no profile of a stage"
        check_own_folder("--profile", settings.profile, _is_profile, what)


def outputs_of(
    settings: Settings, default: str, count: int, read: Sequence[Path] = ()
) -> Outputs:
    """Where the videos go; creates nothing.

    Args:
        default: the place without --out.
        read: as of :func:`check_written`.
    """
    with _of("--out"):
        return plan_outputs(
            default if settings.out is None else settings.out,
            count,
            inputs=[*settings.inputs(), *read],
            overwrite=settings.overwrite,
            report=settings.report,
        )


def _is_profile(path: Path) -> bool:
    held = {inside.name for inside in path.glob("*")}
    return path.name in list(StageName) and path.is_dir() and held <= {"plugins"}


@contextlib.contextmanager
def _of(flag: str) -> Iterator[None]:
    """Let what is refused in the block begin with a flag."""
    try:
        yield
    except TpuportError as error:
        if not str(error).startswith("--"):
            error.args = (f"{flag}: {error}",)
        raise
