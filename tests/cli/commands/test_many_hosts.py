"""One model over processes, started as a user starts them; each has devices of its own.

Tests with a pipeline start processes that import torch and compile: 10 to 60 s.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.tools import Cli, example
from tests.processes import Once
from tpuport.core.mesh.coordinator import LINGER

ASKED = (
    *("--prompt", "a fox runs", "--size", "32x16", "--frames", "5"),
    *("--mesh", "dp=2,sp=2"),
)


class Processes:
    """``tpuport ARGS`` on some processes with four devices in all.

    Args:
        each: what one process alone is told, by its number.
        start: how many are started; all of ``count`` by default.
        slurm: the processes are told by the variables of SLURM.
    """

    def __init__(
        self,
        count: int,
        *args: str | Path,
        each: Sequence[Sequence[str]] = (),
        start: int | None = None,
        wait: str = "50",
        slurm: bool = False,
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        devices = f"--xla_force_host_platform_device_count={4 // count}"
        flags = f"{os.environ['XLA_FLAGS']} {devices}"
        own = {"XLA_FLAGS": flags, "TPUPORT_HOSTS_WAIT": wait}
        self.running = [
            subprocess.Popen(
                (
                    *(sys.executable, "-m", "tpuport", *map(str, args)),
                    *(("--distributed",) if slurm else by_hand(port, count, number)),
                    *(each[number] if each else ()),
                ),
                env=os.environ | own | (by_slurm(count, number) if slurm else {}),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(count if start is None else start)
        ]

    def ended(self) -> list[tuple[int, str, str]]:
        """Of each process its exit code, stdout and stderr."""
        said = [one.communicate(timeout=600) for one in self.running]
        codes = [one.returncode for one in self.running]
        return [(code, *text) for code, text in zip(codes, said, strict=True)]


def by_hand(port: int, count: int, number: int) -> tuple[str, ...]:
    """The flags of a process."""
    at = ("--coordinator", f"127.0.0.1:{port}", "--num-processes", str(count))
    return (*at, "--process-id", str(number))


def by_slurm(count: int, number: int) -> dict[str, str]:
    """What ``srun --ntasks-per-node=1`` sets for a task, of all that jax reads."""
    return {
        "SLURM_JOB_ID": str(os.getpid()),  # makes the port
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": "0",
    }


def frames(video: str) -> str:
    """The hash of a video's frames, as the sidecar has it."""
    digest = json.loads(Path(f"{video}.json").read_text())["frames_sha256"]
    assert isinstance(digest, str)
    return digest


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("CogVideoXPipeline", 2),
        ("HunyuanVideo15Pipeline", 2),
        # No plugin; the default run has this pipeline in the test of a kill.
        pytest.param("LTXPipeline", 2, marks=pytest.mark.sweep),
        pytest.param("CogVideoXPipeline", 4, marks=pytest.mark.sweep),
        pytest.param("HunyuanVideo15Pipeline", 4, marks=pytest.mark.sweep),
        pytest.param("LTXPipeline", 4, marks=pytest.mark.sweep),
    ],
)
def test_any_number_of_processes_makes_the_same_bytes(
    cli: Cli, once: Once, name: str, count: int
) -> None:
    what: tuple[str | Path, ...] = ("--weights", example(once, name), *ASKED)
    what = (*what, "--steps", "2")
    slurm = name == "HunyuanVideo15Pipeline"
    if name == "LTXPipeline":
        what = (*what, "--size", "64x32")
    cli.good("generate", *what, "--out", "one.mp4")
    cli("runs", "clean", "--all")
    what = ("generate", *what, "--out", "many.mp4", "--json")
    ended = Processes(count, *what, slurm=slurm).ended()
    for code, _, err in ended:
        assert code == 0, err
    first, *others = ended
    assert json.loads(first[1])["mesh"] == "dp=2,sp=2,tp=1"
    assert others == [(0, "", "")] * (count - 1)
    assert frames("many.mp4") == frames("one.mp4")


def test_after_a_kill_the_others_end_and_the_run_goes_on_with_one(
    cli: Cli, once: Once
) -> None:
    folder = example(once, "LTXPipeline")
    what = ("--weights", folder, *ASKED, "--size", "64x32", "--steps", "60")
    many = Processes(
        *(2, "generate", *what, "--run-dir", "run", "--checkpoint-every", "1"),
        *("--out", "many.mp4"),
    )
    until = time.monotonic() + 600
    while not list(Path("run").glob("video-0/tape.json")) and time.monotonic() < until:
        assert many.running[0].poll() is None
        time.sleep(0.01)
    many.running[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    (code, _, err), _ = many.ended()
    assert time.monotonic() - began < 60
    assert code == 1
    assert f"error: process 1 ({socket.gethostname()}) died\n" in err
    assert "tpuport resume run" in err
    assert not list(Path().glob("*many*"))
    cli.good("resume", "run", "--out", "many.mp4")
    cli.good("generate", *what, "--out", "one.mp4")
    assert frames("many.mp4") == frames("one.mp4")


@pytest.mark.sweep
@pytest.mark.parametrize("number", [0, 1])
def test_a_process_that_stands_still_ends_all(
    cli: Cli, once: Once, number: int
) -> None:
    """Nobody counts as lost before 30 s: more than 60 s in all."""
    what = ("--weights", example(once, "CogVideoXPipeline"), *ASKED)
    many = Processes(
        *(2, "generate", *what, "--steps", "1000", "--run-dir", "run"),
        *("--checkpoint-every", "1", "--out", "many.mp4"),
    )
    until = time.monotonic() + 600
    while not list(Path("run").glob("video-0/tape.json")) and time.monotonic() < until:
        assert many.running[0].poll() is None
        time.sleep(0.01)
    still, other = many.running[number], many.running[1 - number]
    still.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    _, err = other.communicate(timeout=100)
    assert time.monotonic() - began < 50
    line = f"error: process {number} ({socket.gethostname()}) was silent for 30 s"
    assert (other.returncode, line in err.splitlines()) == (1, True), err
    time.sleep(LINGER + 2)  # jax's service has ended too
    still.send_signal(signal.SIGCONT)
    _, err = still.communicate(timeout=100)
    assert (still.returncode, line in err.splitlines()) == (1, True), err
    assert not list(Path().glob("*many*"))


def test_programs_that_processes_compiled_are_those_that_run(
    cli: Cli, once: Once
) -> None:
    what = ("--weights", example(once, "CogVideoXPipeline"), *ASKED, "--steps", "2")
    compiled = ("compile", *what, "--out", "built", "--json")
    (code, out, err), other = Processes(2, *compiled).ended()
    assert code == 0, err
    assert other == (0, "", "")
    count = len(json.loads(out)["programs"])
    assert len(list(Path("built").glob("*.executable"))) == count
    run = ("generate", *what, "--executables", "built", "--out", "many.mp4", "--json")
    (code, out, err), other = Processes(2, *run).ended()
    assert code == 0, err
    assert "was not there" not in err
    assert other == (0, "", "")
    stages = json.loads(out)["report"]["stages"]
    loaded = [one["loaded"] for stage in stages for one in stage["compiles"]]
    assert loaded == [True] * count
    cli.good("generate", *what, "--out", "one.mp4")
    assert frames("many.mp4") == frames("one.mp4")
    # The same mesh of one process: another place for each device.
    ran = cli(*run)
    assert (ran.code, "is not for this run" in ran.err) == (1, True), ran.err
    assert "devices" in ran.err


def test_each_stage_runs_over_processes(cli: Cli, once: Once) -> None:
    what = ("--weights", example(once, "CogVideoXPipeline"), *ASKED, "--steps", "2")
    mesh = ASKED[-2:]
    run = ("--run-dir", "run")
    for asked in (
        ("encode", *what, *run),
        ("denoise", *run, *mesh),
        ("decode", *run, *mesh, "--out", "many.mp4"),
    ):
        (code, _, err), other = Processes(2, *asked).ended()
        assert code == 0, err
        assert other == (0, "", "")
    cli.good("generate", *what, "--out", "one.mp4")
    assert frames("many.mp4") == frames("one.mp4")


@pytest.mark.sweep
def test_a_benchmark_runs_over_processes(once: Once, tmp_path: Path) -> None:
    what = ("--weights", example(once, "CogVideoXPipeline"), *ASKED[2:])
    bench = ("bench", *what, "--steps", "2", "--repeat", "1", "--json")
    cache = ("--cache-dir", tmp_path)
    (code, out, err), other = Processes(2, *bench, *cache).ended()
    assert code == 0, err
    assert other == (0, "", "")
    found = json.loads(out)
    assert (found["mesh"], found["devices"]) == ("dp=2,sp=2,tp=1", 4)
    assert len(found["backends"]["tpuport"]["steady"]["all_seconds"]) == 1


#: The documented call, in the same program on every host.
PROGRAM = """
import hashlib, sys
import jax

address, count, number, folder = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
if count != "1":
    jax.distributed.initialize(address, int(count), int(number))
import diffusers, numpy, torch
import tpuport

pipe = diffusers.CogVideoXPipeline.from_pretrained(folder)
tpuport.port(pipe, mesh="dp=2,sp=2", progress=False)
frames = pipe(
    "a fox runs", height=16, width=32, num_frames=5, num_inference_steps=2,
    output_type="np", generator=torch.Generator().manual_seed(0),
).frames
print(hashlib.sha256(numpy.asarray(frames).tobytes()).hexdigest())
"""


def test_a_pipeline_is_ported_over_processes_from_python(once: Once) -> None:
    folder = example(once, "CogVideoXPipeline")
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

    def made(count: int) -> list[str]:
        devices = f"--xla_force_host_platform_device_count={4 // count}"
        flags = f"{os.environ['XLA_FLAGS']} {devices}"
        running = [
            subprocess.Popen(
                (*(sys.executable, "-c", PROGRAM, address), *map(str, rest)),
                env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rest in ((count, number, folder) for number in range(count))
        ]
        said = [one.communicate(timeout=600)[0] for one in running]
        assert [one.returncode for one in running] == [0] * count
        return [text.split()[-1] for text in said]

    (alone,) = made(1)
    assert made(2) == [alone, alone]


def test_settings_that_differ_end_all_before_anything_is_read(cli: Cli) -> None:
    each = (("--steps", "2"), ("--steps", "3"))
    ended = Processes(2, "generate", "--prompt", "a fox", each=each).ended()
    for code, out, err in ended:
        assert (code, out, err.count("\n")) == (1, "", 1)
        host = socket.gethostname()
        assert f"process 1 ({host}): --steps is 3, and 2 on process 0 ({host})" in err


def test_stages_to_compile_that_differ_end_all(cli: Cli) -> None:
    each = (("--stage", "encode"), ("--stage", "decode"))
    ended = Processes(2, "compile", "--out", "built", each=each).ended()
    for code, _, err in ended:
        assert (code, "--stage is ['decode'], and ['encode'] on" in err) == (1, True)
    assert not Path("built").exists()


def test_a_process_that_never_comes_ends_the_others(cli: Cli) -> None:
    many = Processes(2, "generate", "--prompt", "a fox", start=1, wait="2")
    ((code, _, err),) = many.ended()
    assert code == 1
    assert err.startswith("error: process 1 of 2 did not come within 2 s")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--coordinator", "here"), "is no HOST:PORT"),
        (("--coordinator", "here:1"), "--num-processes and --process-id missing"),
        (("--distributed",), "--distributed: this is no Cloud TPU"),
        (
            (
                *("--coordinator", "here:1", "--num-processes", "2"),
                *("--process-id", "2"),
            ),
            "have the numbers 0 to 1",
        ),
    ],
)
def test_flags_that_do_not_say_where_a_process_is(
    cli: Cli, args: tuple[str, ...], said: str
) -> None:
    cli.refused(said, "generate", "--prompt", "a fox", *args)
