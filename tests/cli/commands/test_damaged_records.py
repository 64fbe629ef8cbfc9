"""run.json and the sidecar with wrong content and a right checksum: one line each."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.cli.tools import Cli, Made
from tests.measure.damage import MISSING, Damage, damaged, damages, reseal, sample
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.run_stages import open_existing
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.run_directory import RunDirectory
from tpuport.core.run.records import read, recorded_stage
from tpuport.core.spec.requests import recorded_request, recorded_variant
from tpuport.errors import ArtifactError, TpuportError
from tpuport.plugins import get_port

#: Fields that nothing reads again: they may be anything.
FREE = re.compile(
    r"checksum|(platform|summary)\..*|stages\.\w+\.(tensors\..*|programs\.<extra>)"
    r"|stages\.\w+\.report\.(<extra>|note\.<extra>|(attention|convolutions|patches).*"
    r"|calls_in_flight(_limit)?|cut|load_seconds|memory|profile|stage|unit"
    r"|steady_(calls|seconds)|tiling\.(?!tiled$).*|compiles\.0\.(?!(loaded|cached)$).*)"
)
#: Fields that may have some of the other values, by these values.
SOME = {
    (MISSING,): re.compile(
        r"stages\.\w+(\.outside|\.others(\.0(\.outside)?)?|\.inputs\..*)?"
        r"|stages\..*(implementations|programs)\.\w+"
        r"|stages\.\w+\.report\.(compiles\.0|note(\.\w+)?)"
    ),
    (None, MISSING): re.compile(
        r"weights\.(fingerprints\.)?(?!source$|fingerprints$)\w+"
        r"|stages\..*versions\.\w+"
    ),
    (None,): re.compile(r"stages\..*\.(seconds_per_call|tiling)"),
    (-1, 0.5, 10**8, 10**30): re.compile(
        r"stages\..*\.\w*(seconds|seconds_per_call)"
        r"|(settings|request)\.(fps|guidance_scale)"
    ),
}


def may_be(damage: Damage) -> bool:
    """Whether the damage leaves what tpuport could have written, or does not read."""
    return bool(FREE.fullmatch(damage.field)) or any(
        damage.value in values and known.fullmatch(damage.field)
        for values, known in SOME.items()
    )


def read_run(file: Path) -> None:
    """All that is read of a run.json."""
    run = RunDirectory.open(file.parent)
    port = get_port(run.model)
    recorded_variant(port, run.variant, file)
    recorded_request(port, run.settings, run.file)
    for name in json.loads(file.read_text())["stages"]:
        recorded_stage(run, name)


def read_sidecar(file: Path) -> None:
    """All that is read of a sidecar."""
    found = read(file)
    port = get_port(found["model"])
    recorded_variant(port, found["variant"], file)
    recorded_request(port, found["request"], file, "request")


def refused(file: Path, damage: Damage, read_all: Callable[[Path], None]) -> bool:
    """Whether the damage is refused: in one line that names the file and the field."""
    whole = json.loads(file.read_text())
    reseal(file, damaged(whole, damage))
    try:
        read_all(file)
    except TpuportError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message.replace(str(file), "")) <= 300
        if not isinstance(damage.value, str) or damage.where[0] != "model":
            assert str(file) in message, (damage, message)
            assert damage.where[-1] in (0, "<extra>") or (
                str(damage.where[-1]) in message
            ), (damage, message)
        return True
    else:
        assert may_be(damage), damage
        return False
    finally:
        file.write_text(json.dumps(whole))


@pytest.fixture
def files(made: Made, tmp_path: Path) -> dict[str, tuple[Path, Any]]:
    """A run.json and a sidecar to damage, with what reads each."""
    shutil.copytree(made.run, tmp_path / "run")
    sidecar = Path(made.ran.json["videos"][1]["sidecar"])
    shutil.copy(sidecar, tmp_path / "side.json")
    return {
        "run": (tmp_path / "run/run.json", read_run),
        "sidecar": (tmp_path / "side.json", read_sidecar),
    }


@pytest.mark.parametrize("kind", ["run", "sidecar"])
def test_each_field_is_held_to_its_type(
    kind: str, files: dict[str, tuple[Path, Any]]
) -> None:
    file, read_all = files[kind]
    tried = sample(damages(json.loads(file.read_text()), 5), 250)
    assert sum(refused(file, damage, read_all) for damage in tried) > len(tried) / 3


def test_a_variant_that_the_model_has_not_is_refused(
    files: dict[str, tuple[Path, Any]],
) -> None:
    file, _ = files["run"]
    reseal(file, {**json.loads(file.read_text()), "variant": "../x"})
    with pytest.raises(ArtifactError, match=f"{file}: has no usable variant "):
        open_existing(Settings(run_dir=file.parent), "denoise")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["run", "sidecar"])
def test_fields_drawn_by_a_seed(kind: str, files: dict[str, tuple[Path, Any]]) -> None:
    """2000 damages; the seed is printed."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    file, read_all = files[kind]
    found = damages(json.loads(file.read_text()), 6)
    tried = sample(found, 2000, random.Random(seed))
    assert sum(refused(file, damage, read_all) for damage in tried) > len(tried) / 3


def test_latents_of_other_channels_are_refused_by_name(cli: Cli, run: Path) -> None:
    file = run / "latents.safetensors"
    latents = load_file(file)["latents"]
    save_file({"latents": torch.cat([latents, latents], 2)}, file)
    document = json.loads((run / "run.json").read_text())
    entry = document["stages"]["denoise"]
    entry["sha256"], entry["bytes"] = hash_output(file)
    reseal(run / "run.json", document)
    ran = cli("decode", "--run-dir", run)
    assert ran.code == 1
    channels = latents.shape[2]
    assert f"error: {file}: tensor latents has shape [2, 4, {2 * channels}," in ran.last
    assert f"channels is {2 * channels} here and {channels} in this run" in ran.last
    latents[0, 0, 0, 0, 0] = float("nan")
    save_file({"latents": latents}, file)
    entry["sha256"], entry["bytes"] = hash_output(file)
    reseal(run / "run.json", document)
    ran = cli("decode", "--run-dir", run)
    assert f"{file}: tensor latents holds NaN or infinite values" in ran.last


def test_a_video_that_is_not_in_the_batch_is_refused(cli: Cli, made: Made) -> None:
    sidecar = Path(made.ran.json["videos"][1]["sidecar"])
    reseal(Path("side.json"), {**json.loads(sidecar.read_text()), "video": 5})
    ran = cli("replay", "side.json")
    assert ran.code == 1
    assert "error: side.json: has no usable video (5 of 1)" in ran.last
