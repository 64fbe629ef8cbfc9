"""run.json, tapes and sidecars with wrong content and a right checksum: one line."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tools import Made
from tests.measure.damage import MISSING, Damage, damaged, damages, reseal, sample
from tpuport.cli.asked.settings import Settings
from tpuport.cli.commands.replay import _again, _recorded
from tpuport.cli.runs.staged import _asked_again
from tpuport.core.drive.pipeline_run import PipelineRun
from tpuport.core.pipelines import sidecar
from tpuport.errors import TpuportError

#: Fields that nothing reads again, or that are compared and not used.
FREE = re.compile(
    r"checksum|created|tpuport_version|(platform|summary|output)\..*|pipeline|source"
    r"|out|video|noise|(weights|inputs|versions)(\..*)?|frames_sha256"
    r"|request\.(flags|options|prompts|negative_prompts|seeds)(\..*)?"
    r"|how\.(?!backend|dtype|mesh).*|asked(\..*)?|.*<extra>"
)
#: Fields that may be null or missing, by these values.
SOME = {(None, MISSING): re.compile(r"how\.vae_tiling|asked\.\w+")}


def may_be(damage: Damage) -> bool:
    """Whether the damage leaves what tpuport could have written, or does not read."""
    return bool(FREE.fullmatch(damage.field)) or any(
        damage.value in values and known.fullmatch(damage.field)
        for values, known in SOME.items()
    )


def read_run(file: Path) -> None:
    """All that is read of a run.json."""
    run = PipelineRun.open(file.parent)
    _asked_again(run, Settings(run_dir=file.parent), resumes=False)


def read_tape(file: Path) -> None:
    """All that is read of a tape."""
    for tape in PipelineRun.open(file.parent.parent).tapes:
        tape.read()


def read_sidecar(file: Path) -> None:
    """All that is read of a sidecar before the work."""
    found = sidecar.read(file)
    _again(file, found)
    _recorded(file, found, Settings())


def refused(file: Path, damage: Damage, read_all: Callable[[Path], None]) -> bool:
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
        assert may_be(damage), damage
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
    tried = sample(damages(json.loads(file.read_text()), 4), 150)
    assert sum(refused(file, damage, read_all) for damage in tried) > len(tried) / 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "tape", "sidecar"])
def test_fields_drawn_by_a_seed(kind: str, files: dict[str, tuple[Path, Any]]) -> None:
    """2000 damages; the seed is printed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    file, read_all = files[kind]
    found = damages(json.loads(file.read_text()), 6)
    tried = sample(found, 2000, random.Random(seed))
    assert sum(refused(file, damage, read_all) for damage in tried) > len(tried) / 4
