"""run.json, tapes and sidecars with wrong content and a right checksum: one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tools import Made
from tests.measure.damage import MISSING, Damage, damaged, damages, reseal, sample
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.replayed import _recorded, _wanted
from tpuport.cli.runs.staged import _asked_again
from tpuport.core.drive.pipeline_run import PipelineRun
from tpuport.core.pipelines import sidecar
from tpuport.errors import TpuportError

#: Fields of any value: what nothing reads again, what upstream's own code reads
#: (options and plain values), and what is compared alone.
FREE = {
    "run": r"checksum|asked\.options(\..*)?",
    "sidecar": r"checksum|(platform|summary)\..*|request\.options\..*",
    "tape": r"checksum|how\..*|(calls\.0\.call\.answer|steps\.0\.\w+)\.plain(\..*)?"
    r"|histories\.plain\.<extra>",
}
#: Fields that may be null or missing: what was not given, or not known.
ABSENT = {
    "run": r"asked\.\w+(\.0)?|versions\.\w+|weights\.\w+",
    "sidecar": r"how\.(vae_tiling|weights_on)"
    r"|request\.(flags\.\w+|(negative_)?prompts\.0)|versions\.\w+|weights\.fingerprints\.\w+",
    "tape": r"finished|calls\.0(\.call\.(answer|random))?|steps\.0|.*\.tensors\.0",
}
#: Other values that say something too: one prompt, one seed, one device, no history.
OTHER = (
    *(("asked.prompt", value) for value in ("", "no such word")),
    *(("asked.seed", value) for value in (-1, 10**8, 10**30)),
    ("asked.mesh", {}),
    *(("histories.plain.dict", value) for value in ("", {})),
)


def may_be(kind: str, damage: Damage) -> bool:
    """Whether the damage leaves what tpuport could have written, or does not read."""
    field, value = damage.field, damage.value
    absent = value in (None, MISSING) and re.fullmatch(ABSENT[kind], field)
    return bool(re.fullmatch(FREE[kind], field) or absent or (field, value) in OTHER)


def read_run(file: Path) -> None:
    """All that is read of a run.json."""
    run = PipelineRun.open(file.parent)
    for resumes in (False, True):
        _asked_again(run, Settings(run_dir=file.parent), resumes=resumes)


def read_tape(file: Path) -> None:
    """All that is read of a tape."""
    for tape in PipelineRun.open(file.parent.parent).tapes:
        tape.read()


def read_sidecar(file: Path) -> None:
    """All that is read of a sidecar before the work."""
    found = sidecar.read(file)
    _wanted(file, found)
    _recorded(file, found, Settings())


def refused(
    kind: str, file: Path, damage: Damage, read_all: Callable[[Path], None]
) -> bool:
    """Whether the damage is refused: in one line that names the file."""
    whole = json.loads(file.read_text())
    reseal(file, damaged(whole, damage))
    try:
        read_all(file)
    except TpuportError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message.replace(str(file), "")) <= 300
        assert str(file.parent) in message, (damage, message)
        return True
    else:
        assert may_be(kind, damage), damage
        return False
    finally:
        file.write_text(json.dumps(whole))


@pytest.fixture
def files(made: Made, tmp_path: Path) -> dict[str, tuple[Path, Any]]:
    """A run.json, a tape and a sidecar to damage, with what reads each."""
    shutil.copytree(made.folder / "run", tmp_path / "run")
    shutil.copy(made.ran.json["videos"][1]["sidecar"], tmp_path / "side.json")
    return {
        "run": (tmp_path / "run/run.json", read_run),
        "tape": (tmp_path / "run/video-0/tape.json", read_tape),
        "sidecar": (tmp_path / "side.json", read_sidecar),
    }


@pytest.mark.parametrize("kind", ["run", "tape", "sidecar"])
def test_each_field_is_held_to_its_type(
    kind: str, files: dict[str, tuple[Path, Any]]
) -> None:
    file, read_all = files[kind]
    tried = sample(damages(json.loads(file.read_text()), 6), 250)
    assert (
        sum(refused(kind, file, damage, read_all) for damage in tried) > len(tried) / 4
    )
