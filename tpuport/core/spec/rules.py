"""Checks of settings that need nothing else."""

from __future__ import annotations

from pathlib import Path

from tpuport.core.enums import StageName
from tpuport.core.files.folders import check_own_folder
from tpuport.core.spec.run_settings import Asked, RunSettings
from tpuport.errors import UsageError


def check_inspection(settings: RunSettings) -> None:
    """Refuse a folder for profiles in which there is something else.

    Raises:
        UsageError: what is there, or a number of calls without a folder.
    """
    if settings.profile is None and settings.profile_calls is not None:
        raise UsageError("--profile-calls goes with --profile only")
    if settings.profile is not None:
        what = "is no profile of a stage"
        check_own_folder("--profile", settings.profile, _is_profile, what)


def _is_profile(path: Path) -> bool:
    held = {inside.name for inside in path.glob("*")}
    return path.name in list(StageName) and path.is_dir() and held <= {"plugins"}


def check_size(asked: Asked) -> None:
    """Refuse a size class beside a size.

    Raises:
        UsageError: both were asked for.
    """
    by_class = asked.resolution is not None or asked.aspect_ratio is not None
    if by_class and (asked.height or asked.width):
        raise UsageError(
            "resolution and aspect_ratio exclude height, width and size; give one or "
            "the other"
        )
