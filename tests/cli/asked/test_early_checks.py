"""What is refused before anything is opened, and that it is refused there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpuport.cli.asked.sessions import check_early
from tpuport.cli.asked.settings import Settings
from tpuport.core.enums import Backend
from tpuport.core.files.folders import check_folder
from tpuport.errors import MissingArtifactError, MissingWeightsError, UsageError


@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        (Settings(weights="./nosuch"), MissingWeightsError, "does not exist"),
        (
            Settings(executables=Path("nosuch")),
            MissingArtifactError,
            "the folder of executables nosuch does not exist; make the folder with",
        ),
        (
            Settings(executables=Path(__file__)),
            MissingArtifactError,
            "test_early_checks.py is not a folder",
        ),
        (
            Settings(executables=Path(__file__).parent),
            MissingArtifactError,
            "manifest.json: is missing",
        ),
        (
            Settings(executables=Path("nosuch"), backend=Backend.DIFFUSERS),
            UsageError,
            "--executables are not upstream's",
        ),
        (
            Settings(options={"scheduler": "euler"}),
            UsageError,
            "option scheduler='euler': choose one of checkpoint, ddim, dpm",
        ),
        (
            Settings(width=96, height=64, aspect_ratio=(1.0, 1.0)),
            UsageError,
            "exclude height, width and size",
        ),
    ],
    ids=[
        "weights",
        "executables",
        "a file",
        "no manifest",
        "executables of upstream",
        "option",
        "size",
    ],
)
def test_it_is_refused_as_a_request_that_cannot_be(
    settings: Settings, kind: type[UsageError], said: str
) -> None:
    with pytest.raises(kind, match=said) as caught:
        check_early(settings)
    assert caught.value.exit_code == 2


def test_a_folder_to_write_to_is_looked_at_and_not_made(tmp_path: Path) -> None:
    (tmp_path / "fox.gif").touch()
    with pytest.raises(UsageError, match=r"--out .*fox\.gif is not a folder"):
        check_folder("--out", tmp_path / "fox.gif")
    with pytest.raises(UsageError, match=r"fox\.gif is not a folder"):
        check_folder("--out", tmp_path / "fox.gif" / "built")
    check_folder("--out", tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()
