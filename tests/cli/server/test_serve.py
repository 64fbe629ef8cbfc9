"""A whole server of the small pipeline: its clients, kills, deletes and previews.

Each server imports torch and jax twice, and compiles: more than 10 s.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from tests.cli.runs.test_loras import write_lora
from tests.cli.server.running import PATIENCE, Running, running, until
from tests.cli.tools import Cli
from tests.measure.fuzz import fuzz
from tpuport.core.files.run_lock import holder
from tpuport.core.files.sources import read_video

ROOT = Path(__file__).parents[3]
FLAGS = (
    *("--size", "32x16", "--frames", "5", "--steps", "2"),
    *("--option", "max_sequence_length=16"),
)
#: So many steps that a test sees some of them, and so many of a server that is killed.
MANY, KEPT, TOGETHER = 5000, 300, 900


@pytest.fixture(scope="module")
def environment(cache: Path) -> dict[str, str]:
    return {"TPUPORT_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def server(
    folder: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    place = tmp_path_factory.mktemp("served")
    flags = ("--weights", folder, *FLAGS, "--folder", "kept", "--queue", "3")
    flags += ("--max-steps", "5000")
    with running(place, *flags, environment=environment) as found:
        found.ready()
        yield found


@pytest.fixture
def client(server: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def alone(cli: Cli, folder: Path, name: str, *flags: str) -> bytes:
    """The video that `generate` makes."""
    cli.good("generate", "--weights", folder, *FLAGS, *flags, "--out", name)
    return Path(name).read_bytes()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_openais_client_makes_the_video_that_generate_makes(
    client: openai.OpenAI, server: Running, cli: Cli, folder: Path
) -> None:
    extra = {"seed": 7, "guidance_scale": 1.5}
    made = client.videos.create_and_poll(
        prompt="a fox", size="32x16", extra_body=extra, poll_interval_ms=50
    )
    assert (made.status, made.progress, made.size) == ("completed", 100, "32x16")
    assert (made.prompt, made.error, made.seconds) == ("a fox", None, "0.5")
    assert made.completed_at is not None
    assert made.expires_at == made.completed_at + 7 * 86400
    about: Any = made.to_dict()["tpuport"]
    assert set(about["stages"]) == {"encode", "denoise", "decode"}
    assert about["peak_host_bytes"] > 1 << 20
    video = client.videos.download_content(made.id).read()
    assert video == alone(cli, folder, "fox.mp4", "--prompt", "a fox", "--seed", "7",
                          "--guidance", "1.5")  # fmt: skip
    sheet = client.videos.download_content(made.id, variant="spritesheet").read()
    first = client.videos.download_content(made.id, variant="thumbnail").read()
    frame, *others = read_video("fox.mp4")
    assert about["frames"] == 1 + len(others)
    shown = Image.open(io.BytesIO(first))
    assert (shown.format, shown.size) == ("WEBP", frame.size)
    assert Image.open(io.BytesIO(sheet)).format == "JPEG"
    # The sidecar is of the video: replay makes the same frames.
    sidecar = client.videos.download_content(
        made.id,
        variant="sidecar",  # type: ignore[arg-type]
    ).read()
    Path("fox.mp4.json").write_bytes(sidecar)
    again = ("replay", "fox.mp4.json", "--weights", folder)
    assert cli.good(*again, "--json").json["same"] is True
    part = client.videos.with_raw_response.download_content(
        made.id, extra_headers={"Range": "bytes=4-7"}
    )
    assert part.content == video[4:8] == b"ftyp"
    assert client.models.list().data[0].id == made.model
    assert client.videos.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.videos.retrieve(made.id)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_request_that_comes_again_with_its_key_is_the_same_job(
    client: openai.OpenAI, server: Running
) -> None:
    """As a client asks whose answer was lost, also where the job filled the queue."""
    own = {"Idempotency-Key": "of-a-fox"}

    def asked(seed: int = 1, **headers: str) -> str:
        extra = {"seed": seed, "n": 8, "num_inference_steps": MANY}
        more: Any = {"extra_body": extra, "extra_headers": headers}
        return client.videos.create(prompt="a fox", **more).id

    with ThreadPoolExecutor(4) as pool:
        names = set(pool.map(lambda _: asked(**own), range(4)))
    assert len(names) == 1
    until(lambda: server.job(*names)["status"] == "in_progress")
    others = [server.create(prompt=f"fox {n}") for n in range(3)]
    assert server.ask("/v1/videos", {"prompt": "one more"})[0] == 429
    assert {asked(**own)} == names
    with pytest.raises(openai.UnprocessableEntityError) as caught:
        asked(seed=2, **own)
    assert caught.value.param == "Idempotency-Key"
    with pytest.raises(openai.BadRequestError, match="Idempotency-Key"):
        asked(**{"Idempotency-Key": "k" * 256})
    for name in (*others, *names):
        client.videos.delete(name)
    again = asked(**own)
    assert again not in names
    client.videos.delete(again)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_clients_page_through_jobs_and_are_told_what_is_wrong(
    client: openai.OpenAI, server: Running
) -> None:
    names = [
        client.videos.create(prompt=f"fox {n}", extra_body={"n": n}).id for n in (1, 2)
    ]
    for name in names:
        server.done(name)
    found = [video.id for video in client.videos.list(limit=1, order="asc")]
    assert [name for name in found if name in names] == names
    newest = client.videos.list(limit=1)
    assert [video.id for video in newest.data] == [names[1]]
    both = [server.video(names[1], f"?index={n}") for n in (0, 1)]
    assert both[0] != both[1]
    with pytest.raises(openai.BadRequestError) as caught:
        client.videos.create(prompt="x", extra_body={"num_inference_step": 2})
    assert caught.value.param == "num_inference_step"
    assert "did you mean num_inference_steps?" in str(caught.value)
    with pytest.raises(openai.BadRequestError) as caught:
        client.videos.create(prompt="x", size="64x64")  # type: ignore[arg-type]
    assert "these are: 32x16 5 frames" in str(caught.value)
    with pytest.raises(openai.BadRequestError, match="input_reference"):
        client.videos.create(prompt="x", input_reference=("x.png", b"x", "image/png"))
    # What upstream refuses is refused before the queue.
    code, refused = server.ask(
        "/v1/videos", {"prompt": "x", "extra": {"no_such_option": 3}}
    )
    assert (code, "no_such_option" in refused["error"]["message"]) == (400, True)
    for name in names:
        client.videos.delete(name)


def test_the_lines_of_the_page_run_as_written(server: Running, tmp_path: Path) -> None:
    page = (ROOT / "docs/serve.md").read_text()
    lines = next(
        b for b in re.findall(r"```console\n(.*?)```", page, re.S) if "curl" in b
    )
    assert lines.count("curl ") == 6
    create, rest = lines.split("curl -s http://127.0.0.1:8000/v1/videos -F", 1)
    script = f"""set -eu
{create}
ID=$(curl -s http://127.0.0.1:8000/v1/videos -F{rest.splitlines()[0]} \
  | python3 -c 'import json, sys; print(json.load(sys.stdin)["id"])')
while curl -s http://127.0.0.1:8000/v1/videos/$ID | grep -qE 'queued|in_progress'
do sleep 0.1; done
""" + "\n".join(rest.splitlines()[1:])
    script = script.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}")
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert '"deleted":true' in ran.stdout
    assert (tmp_path / "circle.mp4").read_bytes()[4:8] == b"ftyp"


def test_a_deleted_job_stops_within_a_step_and_leaves_nothing(
    server: Running, cli: Cli, folder: Path
) -> None:
    name = server.create(prompt="a fox", num_inference_steps=MANY)
    waits = server.create(prompt="a cat", seed=3)

    def steps() -> Any:
        job = server.job(name)
        return job.get("progress", 0) > 0 and job

    job = until(steps)
    assert (job["status"], job["tpuport"]["steps"]) == ("in_progress", MANY)
    assert 0 < job["progress"] < 100
    assert server.job(waits)["status"] == "queued"
    assert server.ask(f"/v1/videos/{name}", method="DELETE")[1]["deleted"] is True
    before = made_steps(server)
    assert server.ask(f"/v1/videos/{name}")[0] == 404
    jobs = server.log.parent / "kept/jobs"
    until(lambda: not (jobs / name).exists())
    assert server.done(waits)["status"] == "completed"
    # Messages under way count too, and two steps are of the other job.
    # tests/cli/server/test_jobs.py has the step itself.
    assert made_steps(server) - before < MANY / 5
    # The pipeline stayed open, and nothing of the other job is in the next one.
    assert server.video(waits) == alone(cli, folder, "cat.mp4", "--prompt", "a cat",
                                        "--seed", "3")  # fmt: skip
    server.ask(f"/v1/videos/{waits}", method="DELETE")
    until(lambda: not (jobs / waits).exists())


def made_steps(server: Running) -> float:
    """Steps of all jobs, from /metrics."""
    text = server.ask("/metrics")[1].decode()
    found = re.search(r"^tpuport_steps_total (\S+)", text, re.M)
    assert found is not None
    return float(found[1])


def test_a_full_queue_and_a_preview(server: Running) -> None:
    first = server.create(prompt="a fox", num_inference_steps=MANY, n=8)
    until(lambda: server.job(first)["status"] == "in_progress")
    others = [server.create(prompt=f"fox {n}") for n in range(3)]
    assert server.job(others[2])["tpuport"]["position"] == 3
    code, refused = server.ask("/v1/videos", {"prompt": "one more"})
    assert (code, "3 jobs wait" in refused["error"]["message"]) == (429, True)
    for name in others:
        server.ask(f"/v1/videos/{name}", method="DELETE")
    preview = until(lambda: server.job(first)["tpuport"]["preview"])
    assert preview is True
    shown = server.video(first, "?variant=preview")
    assert Image.open(io.BytesIO(shown)).format == "PNG"
    assert server.ask(f"/v1/videos/{first}/content")[0] == 409
    server.ask(f"/v1/videos/{first}", method="DELETE")


def test_a_killed_server_goes_on_to_the_same_bytes(
    environment: dict[str, str], cli: Cli, folder: Path, tmp_path: Path
) -> None:
    """Two servers, one after the other: more than 10 s."""
    flags = ("--weights", folder, *FLAGS, "--folder", "kept", "--checkpoint-every", "1")
    flags += ("--max-steps", "5000")
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    given = ("--api-key-file", keys)
    with running(tmp_path, *flags, *given, environment=environment) as server:
        server.ready()
        asked = {"prompt": "a fox", "num_inference_steps": KEPT, "seed": 5}
        code, job = server.ask("/v1/videos", asked, key="first-key")
        assert code == 200
        name, other = job["id"], {"prompt": "a cat"}
        second = server.ask("/v1/videos", other, key="second-key")[1]["id"]
        assert server.ask("/v1/videos", key="wrong-key")[0] == 401
        assert server.ask(f"/v1/videos/{name}", key="second-key")[0] == 404
        tape = tmp_path / f"kept/jobs/{name}/run-0/video-000/tape.json"
        at = f"/v1/videos/{name}"

        def some() -> bool:
            step = server.ask(at, key="first-key")[1]["tpuport"]["step"]
            return step > 5 and any(tape.parent.parent.rglob("tape.json"))

        until(some)
        server.kill()
    with running(tmp_path, *flags, *given, environment=environment) as server:
        paths = {name: "first-key", second: "second-key"}
        for one, key in paths.items():
            path = f"/v1/videos/{one}"

            def ended(path: str = path, key: str = key) -> bool:
                job = server.ask(path, key=key)[1]
                assert job["status"] != "failed", job
                return bool(job["status"] == "completed")

            until(ended, 3 * PATIENCE)
        video = server.ask(f"{at}/content", key="first-key")[1]
        found = re.search(r"going on with the run in .*, after step (\d+)", server.said)
        assert found is not None, server.said
        assert 0 < int(found[1]) < KEPT
        began = time.monotonic()
        assert server.end(signal.SIGINT) == 128 + signal.SIGINT
        word, kept = server.said.splitlines()[-2:]
        assert word == "interrupted"
        assert kept.startswith(f"jobs are kept in {tmp_path}/kept; the same command")
        assert time.monotonic() - began < 120
    wanted = alone(cli, folder, "fox.mp4", "--prompt", "a fox", "--seed", "5",
                   "--steps", str(KEPT))  # fmt: skip
    assert video == wanted


def test_jobs_of_one_key_are_made_in_one_call(
    environment: dict[str, str], cli: Cli, folder: Path, tmp_path: Path
) -> None:
    """Two servers, one after the other: more than 10 s.

    The call goes on after a kill; each video is the one made alone but for a rounding.
    """
    flags = ("--weights", folder, *FLAGS, "--folder", "kept", "--checkpoint-every", "1")
    flags += ("--max-steps", "5000", "--batch-size", "2", "--api-key-file", "keys")
    (tmp_path / "keys").write_text("first-key\nsecond-key\n")
    jobs = tmp_path / "kept/jobs"
    with running(tmp_path, *flags, environment=environment) as server:
        server.ready()
        (batch,) = until(lambda: server.ask("/ready")[1]["shapes"][0]["batches"])
        assert batch["used"] == (
            batch["step_seconds"] < 2 * batch["step_seconds_alone"]
        )
        assert batch["used"], "this machine makes two videos no faster together"
        one, other = Key(server, "first-key"), Key(server, "second-key")
        before = one.create("before", MANY)
        until(lambda: one.job(before)["status"] == "in_progress")
        fox, cat = one.create("a fox"), other.create("a cat")
        hen, dog = one.create("a hen"), one.create("a dog")
        one.delete(before)
        until(lambda: one.job(hen)["tpuport"]["step"] > 5)
        until(lambda: any(jobs.glob(f"{fox}/+*/*/tape.json")))
        assert [one.job(name)["status"] for name in (fox, hen, dog)] == [
            *("in_progress", "in_progress", "queued")
        ]
        assert other.job(cat)["status"] == "queued"
        server.kill()
    with running(tmp_path, *flags, environment=environment) as server:
        one, other = Key(server, "first-key"), Key(server, "second-key")
        until(lambda: other.done(cat) and one.done(dog), 3 * PATIENCE)
        assert re.search(r"going on with the run in \S+/\+.*, after step", server.said)
        names = {"a fox": fox, "a hen": hen}
        for prompt, name in names.items():
            sidecar = one.content(name, "?variant=sidecar")
            assert sidecar["request"]["prompts"] == [*names]
            check_alone(cli, folder, prompt, one.content(name))
        assert other.content(cat, "?variant=sidecar")["request"]["prompts"] == ["a cat"]
        # One of two is deleted: the other one is made anew, alone.
        before = one.create("before", MANY)
        fox, hen = one.create("a fox"), one.create("a hen")
        one.delete(before)
        until(lambda: one.job(fox)["tpuport"]["step"] > 5)
        one.delete(hen)
        until(lambda: one.done(fox))
        assert one.content(fox) == Path("a fox.mp4").read_bytes()
        assert not (jobs / hen).exists()


class Key:
    """A client with a key."""

    def __init__(self, server: Running, key: str) -> None:
        self._server, self._key = server, key

    def create(self, prompt: str, steps: int = TOGETHER) -> str:
        asked = {"prompt": prompt, "num_inference_steps": steps}
        code, job = self._server.ask("/v1/videos", asked, key=self._key)
        assert code == 200, job
        return str(job["id"])

    def job(self, name: str) -> Any:
        return self._server.ask(f"/v1/videos/{name}", key=self._key)[1]

    def done(self, name: str) -> bool:
        job = self.job(name)
        assert job["status"] != "failed", job
        return bool(job["status"] == "completed")

    def content(self, name: str, query: str = "") -> Any:
        code, found = self._server.ask(
            f"/v1/videos/{name}/content{query}", key=self._key
        )
        assert code == 200, found
        return found

    def delete(self, name: str) -> None:
        self._server.ask(f"/v1/videos/{name}", method="DELETE", key=self._key)


def check_alone(cli: Cli, folder: Path, prompt: str, video: bytes) -> None:
    """A video is the one that `generate` makes, but for a rounding of one level."""
    alone(cli, folder, f"{prompt}.mp4", "--prompt", prompt, "--steps", str(TOGETHER))
    Path("together.mp4").write_bytes(video)
    found, wanted = (
        np.stack([np.asarray(f, np.int16) for f in read_video(name)])
        for name in ("together.mp4", f"{prompt}.mp4")
    )
    assert wanted.std() > 1
    assert np.abs(found - wanted).max() <= 1


@pytest.fixture(scope="module")
def other_server(
    folder: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Running]:
    """With two shapes and a LoRA; jobs go 30 seconds after their end."""
    place = tmp_path_factory.mktemp("other")
    (place / "loras").mkdir()
    shutil.move(write_lora(folder, seed=1), place / "loras/fox.safetensors")
    flags = ("--weights", folder, *FLAGS[4:], "--folder", "kept", "--loras", "loras")
    flags += ("--shapes", "32x16x5", "--shapes", "16x16x5", "--keep", "30s")
    flags += ("--checkpoint-every", "1", "--max-steps", "5000")
    with running(place, *flags, environment=environment) as found:
        found.ready()
        yield found


def test_a_lora_a_shift_and_a_second_shape(
    other_server: Running, cli: Cli, folder: Path
) -> None:
    """Another server: more than 10 s."""

    def shapes() -> list[str]:
        found = other_server.ask("/ready")[1]["shapes"]
        return [shape["size"] for shape in found if shape["state"] == "ready"]

    until(lambda: shapes() == ["32x16", "16x16"])
    names = {
        other_server.create(prompt="a fox", lora="fox:0.5"): (
            *("--lora", str(other_server.log.parent / "loras/fox.safetensors:0.5")),
        ),
        other_server.create(prompt="a fox", flow_shift=5): (
            *("--option", "scheduler=checkpoint:shift=5"),
        ),
        other_server.create(prompt="a fox", size="16x16"): ("--size", "16x16"),
    }
    found = []
    for number, (name, flags) in enumerate(names.items()):
        assert other_server.done(name)["error"] is None
        found.append(other_server.video(name))
        wanted = alone(cli, folder, f"{number}.mp4", "--prompt", "a fox", *flags)
        assert found[-1] == wanted, flags
    assert len(set(found)) == 3
    code, refused = other_server.ask("/v1/videos", {"prompt": "x", "lora": "5"})
    assert (code, "is not here" in refused["error"]["message"]) == (400, True), refused
    # Jobs go with their files.
    jobs = other_server.log.parent / "kept/jobs"
    until(lambda: not any(jobs.iterdir()))
    assert other_server.ask("/v1/videos")[1]["data"] == []


def test_a_job_goes_on_after_the_engine_is_killed(
    other_server: Running, cli: Cli, folder: Path
) -> None:
    """An engine that starts anew: more than 10 s."""
    name = other_server.create(prompt="a fox", num_inference_steps=KEPT)
    run_dir = other_server.log.parent / f"kept/jobs/{name}/run-0"
    until(
        lambda: (
            other_server.job(name)["tpuport"]["step"] > 5
            and any(run_dir.rglob("tape.json"))
        )
    )
    os.kill(holder(run_dir) or 0, signal.SIGKILL)
    assert other_server.done(name)["status"] == "completed"
    video = other_server.video(name)
    steps = re.findall(
        r"going on with the run in .*, after step (\d+)", other_server.said
    )
    assert [0 < int(step) < KEPT for step in steps] == [True]
    wanted = ("--prompt", "a fox", "--steps", str(KEPT))
    assert video == alone(cli, folder, "fox.mp4", *wanted)
    assert other_server.ask("/health")[0] == 200


def test_a_fuzzer_finds_no_fault(server: Running) -> None:
    """Ten thousand requests by hand: ``python -m tests.measure.serve``."""
    video = server.create(prompt="a fox")
    server.done(video)
    found = fuzz(server.port, 400, seed=1, at_once=100, video=video)
    assert found.faults == []
    assert found.codes["400"] > 100
    assert found.codes["206"] > 0
    assert found.most > 50
    assert "Traceback" not in server.said
    assert "error:" not in server.said
    assert server.ask("/health") == (200, {"status": "ok"})
