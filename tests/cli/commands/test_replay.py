"""``tpuport replay``: the same frames, or why not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from tests.cli.tools import Cli
from tests.core.files.videos import read_back
from tpuport.core.files.sealed_json import read_sidecar, sidecar_bytes


def altered(sidecar: Path, **changes: Any) -> Path:
    """A copy in the current folder that says something else."""
    path = Path("altered.json")
    path.write_bytes(sidecar_bytes({**read_sidecar(sidecar), **changes}))
    return path


def test_a_replay_gives_the_same_frames(cli: Cli, cache: Path, sidecar: Path) -> None:
    """Also: the sidecar is found by its video, and what is replayed is said."""
    ran = cli.good("replay", "fox.gif", "--out", "again.gif", "--json")
    assert ran.last.startswith("the same frames as fox.gif.json: ")
    assert ran.err.splitlines()[0] == "replaying fox.gif.json (WanPipeline, 'a cat')"
    assert ran.json["same"] is True
    assert ran.json["frames_sha256"] == read_sidecar(sidecar)["frames_sha256"]
    assert read_back("again.gif")[:3] == (5, 16, 32)
    assert read_sidecar(Path("again.gif.json"))["request"]["prompts"] == ["a cat"]


def test_a_recording_elsewhere_is_not_fetched(cli: Cli) -> None:
    cli.refused("is an address; download it", "replay", "https://example.com/fox.mp4")


def test_other_frames_name_both_digests_and_what_changed(
    cli: Cli, sidecar: Path
) -> None:
    recorded = read_sidecar(sidecar)
    versions = {**recorded["versions"], "jax": "0.0.1"}
    file = altered(sidecar, frames_sha256="0" * 64, versions=versions)
    ran = cli("replay", file, "--report", "report.json")
    assert ran.code == 1
    assert ran.out == ""
    line = next(x for x in ran.err.splitlines() if x.startswith("error: "))
    assert "0" * 64 in line
    assert recorded["frames_sha256"] in line
    assert "jax 0.0.1 then" in line
    document = json.loads(Path("report.json").read_text())
    assert document["same"] is False
    assert document["frames_sha256"] == recorded["frames_sha256"]


def test_other_weights_are_refused_before_the_work(
    cli: Cli, sidecar: Path, copied: Path
) -> None:
    (file,) = (copied / "vae").glob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    ran = cli.refused("vae is not what", "replay", sidecar, "--weights", copied, code=1)
    assert "loading" not in ran.err


def test_a_replay_has_the_weights_where_the_run_had_them(
    cli: Cli, sidecar: Path
) -> None:
    """The small blocks of this pipeline cannot stream, which the refusal shows."""
    how = {**read_sidecar(sidecar)["how"], "backend": "tpuport", "weights_on": "host"}
    file = altered(sidecar, how=how)
    cli.refused("--weights-on host (weights_on=): ", "replay", file)


def test_an_image_that_is_not_there_is_named_with_its_sha256(
    cli: Cli, sidecar: Path
) -> None:
    """As the sidecar of a server's video; tests/cli/server/test_clients.py has more."""
    wanted = "7" * 64
    request = read_sidecar(sidecar)["request"]
    request["flags"]["image"] = "/srv/image.png"
    file = altered(sidecar, request=request, inputs={"/srv/image.png": wanted})
    said = f"/srv/image.png: is not there, and {file} records a file with sha256 "
    ran = cli.refused(f"{said}{wanted}; name it with --image", "replay", file, code=1)
    assert "loading" not in ran.err
    Image.new("RGB", (32, 32)).save("cat.png")
    cli.refused("cat.png: has sha256 ", "replay", file, "--image", "cat.png", code=1)
    cli.refused("made from no image", "replay", sidecar, "--image", "cat.png")


def test_a_sidecar_that_is_no_sidecar_is_refused(cli: Cli, sidecar: Path) -> None:
    cli.refused("is missing", "replay", "none.json")
    wrong: tuple[dict[str, Any], ...] = ({"how": {}}, {"video": 5})
    for changes in wrong:
        ran = cli("replay", altered(sidecar, **changes))
        assert ran.code == 1
        assert ran.last.startswith("error: altered.json: ")
        assert "cannot be replayed" in ran.last


def test_a_sidecar_beside_another_video_is_refused(cli: Cli, sidecar: Path) -> None:
    shutil.copy("fox.gif", "fox.mp4")
    sidecar = Path(shutil.copy(sidecar, "fox.mp4.json"))
    with Path("fox.mp4").open("ab") as file:
        file.write(b"!")
    for named in (sidecar, "fox.mp4", "fox"):
        cli.refused(
            "fox.mp4: is not the video of fox.mp4.json", "replay", named, code=1
        )


def test_a_replay_keeps_what_it_compares_with(cli: Cli, sidecar: Path) -> None:
    before = {file: file.read_bytes() for file in (sidecar, Path("fox.gif"))}
    for flags in (("--out", "fox.gif"), ("--report", sidecar), ("--report", "fox.gif")):
        cli.refused("which the run reads", "replay", "fox.gif", *flags, "--overwrite")
    assert {file: file.read_bytes() for file in before} == before
