"""``tpuport submit`` against a small server of the contract in this process."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.server.fake import Fake, picture
from tests.cli.tools import Cli
from tests.processes import LONGEST
from tpuport.cli.commands import submit
from tpuport.cli.server import client
from tpuport.core.files.sealed_json import read_sidecar

FILE = "x.mp4"


def png() -> bytes:
    file = io.BytesIO()
    picture().save(file, "png")
    return file.getvalue()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fake]:
    monkeypatch.setattr(submit, "_POLL", 0.005)
    made = Fake(video=b"a video" * 1000, preview=png())
    made.start()
    yield made
    made.end()


def until(there: Callable[[], object]) -> None:
    ends = time.monotonic() + 120
    while not there():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_video_and_its_sidecar_are_written(cli: Cli, fake: Fake) -> None:
    ran = cli.good(
        *("submit", "--server", fake.url, "--prompt", "a fox", "--out", FILE),
        *("--size", "96x64", "--steps", "3", "--seed", "7", "--seconds", "1.125"),
        *("--flow-shift", "3", "--lora", "olive:0.5", "--option", "a=b", "--json"),
        *("--frames", "9", "--fps", "8", "--guidance", "2", "--negative-prompt", "no"),
        *("--model", "fake"),
    )
    assert Path(FILE).read_bytes() == fake.video
    assert json.loads(Path(f"{FILE}.json").read_text()) == {"sidecar of": "a fox"}
    (job,) = fake.jobs.values()
    assert job.document["tpuport"]["settings"] == {
        "prompt": "a fox",
        "size": "96x64",
        "num_inference_steps": 3,
        "seed": 7,
        "seconds": 1.125,
        "flow_shift": 3.0,
        "lora": ["olive:0.5"],
        "extra": {"a": "b"},
        "num_frames": 9,
        "fps": 8.0,
        "guidance_scale": 2.0,
        "negative_prompt": "no",
        "model": "fake",
    }
    assert ran.json["command"] == "submit"
    assert ran.json["job"] == job.document
    assert ran.json["videos"] == [{"path": FILE, "sidecar": f"{FILE}.json"}]
    assert ran.last == f"wrote {FILE}"
    assert "denoise: 3 steps in " in ran.err


def test_an_existing_video_is_kept_and_n_are_numbered(cli: Cli, fake: Fake) -> None:
    Path(FILE).write_text("mine")
    asked = ("submit", "--server", f"{fake.url}/v1/", "--prompt", "a", "--out", FILE)
    cli.good(*asked)
    assert Path(FILE).read_text() == "mine"
    assert Path("x-2.mp4").read_bytes() == fake.video
    cli.good(*asked, "--overwrite")
    assert Path(FILE).read_bytes() == fake.video
    cli.good(*asked[:-1], "new/y.mp4", "--n", "2")
    made = {path.name for path in Path("new").iterdir()}
    videos = {"y-000.mp4", "y-001.mp4"}
    assert made == videos | {f"{name}.json" for name in videos}


def test_an_image_is_uploaded_with_the_fields(cli: Cli, fake: Fake) -> None:
    Path("cat.png").write_bytes(png())
    cli.good(
        *("submit", "--server", fake.url, "--prompt", "a", "--image", "cat.png"),
        *("--option", "a=1", "--seed", "3", "--out", FILE),
    )
    (job,) = fake.jobs.values()
    assert job.image == png()
    fields = {"prompt": "a", "seed": "3", "extra": '{"a": "1"}'}
    assert job.document["tpuport"]["settings"] == fields
    sidecar = read_sidecar(Path(f"{FILE}.json"))
    assert sidecar["request"]["flags"]["image"] == "cat.png"
    assert sidecar["inputs"] == {"cat.png": hashlib.sha256(png()).hexdigest()}


def test_a_sidecar_names_no_other_image(cli: Cli, fake: Fake) -> None:
    """The file was changed, or is not the one of a job that is waited for again."""
    job = fake.add({"prompt": "a"}, png())["id"]
    picture().resize((32, 32)).save("dog.png")
    asked = ("submit", "--server", fake.url, "--job", job, "--out", FILE)
    cli.refused("--image dog.png: is not what", *asked, "--image", "dog.png", code=1)
    assert [path.name for path in Path().iterdir()] == ["dog.png"]


def test_a_job_whose_answer_is_lost_is_made_once(cli: Cli, fake: Fake) -> None:
    fake.lost = 2
    asked = ("submit", "--server", fake.url, "--prompt", "a", "--out", FILE)
    cli.good(*asked)
    assert [method for method, _, _ in fake.asked].count("POST") == 3
    assert len(fake.jobs) == 1
    cli.good(*asked)  # the next request has its own key
    assert len(fake.jobs) == 2


def test_a_job_that_the_server_may_have_is_told_of(
    cli: Cli, fake: Fake, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake.lost = 1000
    asked = ("submit", "--server", fake.url, "--prompt", "a fox", "--out", FILE)
    process = subprocess.Popen(
        [sys.executable, "-m", "tpuport", *asked],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        # A shell has its background processes ignore Ctrl-C, and so their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until(lambda: len(fake.asked) > 1)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=LONGEST)
    told = f"the server may have the job; GET {fake.url}/v1/videos lists"
    assert process.returncode == 128 + signal.SIGINT
    assert said.splitlines()[-1].startswith(told)
    assert len(fake.jobs) == 1
    monkeypatch.setattr(client, "PATIENCE", 0.0)
    ran = cli(*asked)
    assert (ran.code, ran.last.startswith(told)) == (1, True)


@pytest.mark.parametrize("named", [True, False])
def test_the_key_is_of_a_file_or_of_the_environment(
    cli: Cli, fake: Fake, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.key = "secret"
    asked = ("submit", "--server", fake.url, "--prompt", "a", "--out", FILE)
    ran = cli.refused("no such key; give a key by --api-key-file", *asked)
    assert "secret" not in ran.err
    Path("keys").write_text("# mine\n\nsecret\nother\n")
    monkeypatch.setenv("TPUPORT_API_KEY", "wrong" if named else "secret")
    cli.good(*asked, *(("--api-key-file", "keys") if named else ()))
    assert Path(FILE).exists()


@pytest.mark.parametrize(
    ("args", "said", "code"),
    [
        (("--size", "8x8"), "size: '8x8' is not ready; ready: 96x64", 2),
        (("--prompt", "b"), "one --prompt", 2),
        (("--seed", "1,2"), "one --seed", 2),
        (("--out", "x.gif"), "a server makes .mp4 files", 2),
        (("--image", "absent.png"), "--image absent.png does not exist; check", 2),
        (("--server", "ftp://a"), "such as http://127.0.0.1:8000", 2),
        (("--server", "http://127.0.0.1:1"), "cannot be reached", 1),
        (("--job", "video_1"), "goes without --prompt", 2),
    ],
)
def test_a_refusal_is_one_line_and_writes_nothing(
    cli: Cli, fake: Fake, args: tuple[str, ...], said: str, code: int
) -> None:
    asked = ("submit", "--server", fake.url, "--prompt", "a", "--out", FILE)
    ran = cli.refused(said, *asked, *args, code=code)
    assert ran.err.count("\n") == 1
    assert list(Path().iterdir()) == []


def test_a_failed_job_says_why(cli: Cli, fake: Fake) -> None:
    asked = ("submit", "--server", fake.url, "--prompt", "fail", "--out", FILE)
    cli.refused("failed: the frames are NaN", *asked, code=1)
    assert list(Path().iterdir()) == []


def test_a_full_queue_is_no_reason_to_wait(cli: Cli, fake: Fake) -> None:
    fake.answers = [429]
    asked = ("submit", "--server", fake.url, "--prompt", "a", "--out", FILE)
    cli.refused("429, the server is not up", *asked, code=1)
    assert [method for method, _, _ in fake.asked] == ["POST"]


def test_a_port_of_tls_is_no_server(cli: Cli) -> None:
    """Such a port answers a request without TLS by an alert."""

    def answer(own: socket.socket) -> None:
        with own.accept()[0] as connection:
            connection.sendall(b"\x15\x03\x01\x00\x02\x02\x16")
            connection.recv(1 << 16)

    with socket.create_server(("127.0.0.1", 0)) as own:
        threading.Thread(target=answer, args=(own,)).start()
        url = f"http://127.0.0.1:{own.getsockname()[1]}"
        asked = ("submit", "--server", url, "--prompt", "a", "--out", FILE)
        cli.refused("answers no HTTP", *asked, code=1)


def test_a_server_that_is_started_again_is_waited_for(
    cli: Cli, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_FIRST", 0.05)
    fake.held.set()

    def restart() -> None:
        until(lambda: len(fake.asked) > 1)
        fake.stop()
        time.sleep(0.2)  # gone for longer than one try
        fake.answers = [503]
        fake.start()
        fake.held.clear()

    threading.Thread(target=restart).start()
    ran = cli.good("submit", "--server", fake.url, "--prompt", "a", "--out", FILE)
    assert Path(FILE).read_bytes() == fake.video
    assert "does not answer; trying again in 0.05 s" in ran.err
    assert [method for method, _, _ in fake.asked].count("POST") == 1


def test_a_server_that_stays_away_leaves_the_way_to_go_on(
    cli: Cli, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PATIENCE", 0.0)
    job = fake.add({"prompt": "a"}, None)["id"]
    fake.held.set()
    threading.Thread(target=lambda: (until(lambda: fake.asked), fake.stop())).start()
    asked = ("submit", "--server", fake.url, "--out", FILE, "--job")
    ran = cli(*asked, job)
    assert ran.code == 1
    command = ran.last.partition("`tpuport ")[2].removesuffix("`").split()
    fake.start()
    fake.held.clear()
    cli.good(*command)
    assert Path(FILE).read_bytes() == fake.video


@pytest.mark.parametrize(
    ("signum", "word", "left"),
    [(signal.SIGINT, "is deleted", 0), (signal.SIGTERM, "--job video_", 1)],
)
def test_ctrl_c_deletes_the_job_and_another_signal_leaves_it(
    fake: Fake, tmp_path: Path, signum: int, word: str, left: int
) -> None:
    fake.held.set()
    asked = ("submit", "--server", fake.url, "--prompt", "a", "--out", FILE)
    process = subprocess.Popen(
        [sys.executable, "-m", "tpuport", *asked],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    until(lambda: [path for _, path, _ in fake.asked if "/video_" in path])
    process.send_signal(signum)
    _, said = process.communicate(timeout=LONGEST)
    assert process.returncode == 128 + signum
    assert word in said.splitlines()[-1]
    assert len(fake.jobs) == left
    assert list(tmp_path.iterdir()) == []


def test_half_a_video_is_none(cli: Cli, fake: Fake) -> None:
    """The disk fills while the sidecar is written."""
    asked = ("submit", "--server", fake.url, "--prompt", "a", "--out")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client.Server, "download", _fills)
        cli.refused("no room is left on the disk", *asked, FILE, code=1)
    assert list(Path().iterdir()) == []


def _fills(self: object, name: str, variant: str, index: int, into: Path) -> None:
    into.write_bytes(b"half")
    if variant == "sidecar":
        raise OSError(28, "No space left on device")


def test_help_says_what_submit_takes_alone(cli: Cli) -> None:
    told = cli.good("submit", "--help").out
    assert "--lora NAME[:SCALE]" in told
    for of_generate in (".webm", ".gif", "folder/", "several videos", "FILE|ID", "1,2"):
        assert of_generate not in told
