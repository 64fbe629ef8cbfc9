"""Processes of a run meet, agree, and hear of one that is lost."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

PROCESS = """
import os, signal, sys, time
from pathlib import Path
from tpuport.core.mesh import hosts as module
from tpuport.core.mesh.coordinator import _mind_aborts
from tpuport.core.mesh.hosts import Address, HostError, Hosts
port, count, number = map(int, sys.argv[1:4])
says, does = sys.argv[4:6]
module.BEAT, module.SILENCE = map(float, sys.argv[6:8])
if does == "stands still":
    module.PATIENCE = 1
try:
    hosts = Hosts(Address(("127.0.0.1", port), count, number), {"steps": says}, 8)
    data = hosts.told(lambda: b"a run" * 10**6)
    if does == "dies":
        os.kill(os.getpid(), 9)
    if does == "fails":
        hosts.failed("no room")
        os._exit(3)
    if does == "stands still":
        _mind_aborts(hosts)
        hosts.scratch = Path("scratch")
        hosts.scratch.mkdir()
        os.kill(os.getpid(), signal.SIGSTOP)
        os.abort()  # as jax does, whose service is gone
    while does == "waits":
        time.sleep(0.02)
        hosts.check()
    hosts.over()
    hosts.close()
    print(len(data))
except HostError as error:
    print(error, flush=True)
    os._exit(1)
"""


def started(
    says: Sequence[str], does: Sequence[str], beat: float = 5, silence: float = 30
) -> list[subprocess.Popen[str]]:
    """Three processes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    times = str(beat), str(silence)
    return [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, *map(str, (port, 3, at)), *told, *times],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for at, told in enumerate(zip(says, does, strict=True))
    ]


def ran(says: Sequence[str], does: Sequence[str]) -> list[str]:
    """What each process printed."""
    running = started(says, does)
    return [process.communicate(timeout=120)[0].strip() for process in running]


def test_processes_meet_and_all_have_what_the_first_one_makes() -> None:
    assert ran("888", ["ends"] * 3) == ["5000000"] * 3


@pytest.mark.parametrize("number", [0, 1, 2])
def test_all_hear_of_a_process_that_died(number: int) -> None:
    does = ["waits"] * 3
    does[number] = "dies"
    said = ran("888", does)
    host = socket.gethostname()
    assert said.pop(number) == ""
    assert said == [f"process {number} ({host}) died"] * 2


@pytest.mark.parametrize("number", [0, 1])
def test_all_hear_of_a_process_that_stands_still_and_so_does_that_one(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    does = ["waits"] * 3
    does[number] = "stands still"
    running = started("888", does, beat=0.2, silence=3)
    still = running.pop(number)
    said = [process.communicate(timeout=120)[0].strip() for process in running]
    line = f"process {number} ({socket.gethostname()}) was silent for 3 s"
    assert said == [line] * 2
    assert still.poll() is None
    still.send_signal(signal.SIGCONT)
    assert still.communicate(timeout=120)[0].strip() == f"error: {line}"
    assert still.returncode == 1
    assert list(tmp_path.iterdir()) == []


def test_all_hear_why_a_process_ended() -> None:
    said = ran("888", ["waits", "fails", "waits"])
    host = socket.gethostname()
    assert said == [f"process 1 ({host}) ended: no room", "", said[0]]


def test_all_hear_what_differs_and_where() -> None:
    said = ran("898", ["waits"] * 3)
    assert said == [said[0]] * 3
    assert said[0].startswith(f"process 1 ({socket.gethostname()}): steps is 9, and 8 ")


def test_all_hear_who_did_not_come() -> None:
    said = ran("88", ["waits"] * 2)
    assert said == [said[0]] * 2
    assert said[0].startswith("process 2 of 3 did not come within 8 s")


def test_a_first_process_that_comes_late_waits_no_longer_than_the_others() -> None:
    """Over 8 s, which is how long a process waits here."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    running = []
    for number in "10":
        running.append(
            subprocess.Popen(
                *(
                    [
                        sys.executable,
                        "-c",
                        PROCESS,
                        port,
                        "3",
                        number,
                        "8",
                        "waits",
                        "5",
                        "30",
                    ],
                ),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
        time.sleep(5 * int(number))
    said = [process.communicate(timeout=120)[0] for process in running]
    for one in said:
        found = re.search("process 2 of 3 did not come within ([0-9]+) s", one)
        assert found is not None, said
        assert int(found[1]) <= 5


def test_the_others_hear_that_the_first_process_did_not_come() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    done = subprocess.run(
        [sys.executable, "-c", PROCESS, str(port), "2", "1", "8", "waits", "5", "30"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"process 0 at 127.0.0.1:{port} did not come within 8 s" in done.stdout
