"""How signals end a program, in processes that import nothing heavy."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tpuport.cli import main
from tpuport.cli.shown import signals

#: Signals as in a shell's foreground; tests may run where some are ignored.
HEARD = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""

#: A program that sends itself a signal. Its second line is its work.
PROGRAM = """
import os, signal, sys, time
from tpuport.cli.shown import signals

def send(signum=signal.SIGINT):
    os.kill(os.getpid(), signum)

def run():
    {body}
    print("at its end")
    return 0

raise SystemExit(signals.as_program(run))
"""


def buffered() -> dict[str, str]:
    """The variables of a program that prints in blocks, as into a file."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}


def ended(body: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of the program with this work."""
    body = body.strip().replace("\n", "\n    ")
    done = subprocess.run(
        [sys.executable, "-c", HEARD + PROGRAM.format(body=body)],
        env=buffered(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


#: Work, and what becomes of it.
ENDS: dict[str, tuple[str, tuple[int, str, str]]] = {
    "Ctrl-C unwinds": (
        """
try:
    send()
finally:
    print("unwound")
""",
        (130, "unwound\n", "interrupted\n"),
    ),
    "SIGTERM unwinds": (
        """
try:
    send(signal.SIGTERM)
finally:
    print("unwound")
""",
        (143, "unwound\n", "terminated\n"),
    ),
    "swallowed, it is raised at the next step": (
        """
for step in range(3):
    signals.check()
    print(step)
    try:
        send()
    except KeyboardInterrupt:
        pass
""",
        (130, "0\n", "interrupted\n"),
    ),
    "swallowed, it ends a block of imports": (
        """
try:
    send()
except KeyboardInterrupt:
    pass
with signals.starting():
    print("imported")
""",
        (130, "", "interrupted\n"),
    ),
    "an import that a function returns is followed by nothing": (
        """
import importlib
class Sends:
    def find_spec(*_):
        send()
def imported():
    return importlib.import_module("colorsys")
sys.meta_path.insert(0, Sends)
imported()
""",
        (130, "", "interrupted\n"),
    ),
    "swallowed to the end, it gives its code": (
        """
try:
    send(signal.SIGHUP)
except KeyboardInterrupt:
    pass
""",
        (129, "at its end\n", "hung up\n"),
    ),
    "a library's handler is replaced at the next step": (
        """
signal.signal(signal.SIGTERM, lambda *_: print("of a library"))
signals.check()
send(signal.SIGTERM)
""",
        (143, "", "terminated\n"),
    ),
    "a finaliser is not broken off, after which Python would go on": (
        """
class Held:
    def __del__(self):
        send()
        print("let go")
held = Held()
held = None
signals.check()
""",
        (130, "let go\n", "interrupted\n"),
    ),
    "before anything is at stake, it ends the program": (
        """
with signals.starting(before="on a line of its own: "):
    try:
        send()
    finally:
        print("unwound")
""",
        (130, "", "on a line of its own: interrupted\n"),
    ),
    "the two signals of timeout are one": (
        """
signals._TWICE *= 100  # more than a pause of a busy machine
try:
    send()
finally:
    time.sleep(0.1)
    send()
    time.sleep(0.1)
    print("unwound")
""",
        (130, "unwound\n", "interrupted\n"),
    ),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_signal_ends_a_program(name: str) -> None:
    body, expected = ENDS[name]
    assert ended(body) == expected


def test_an_import_is_not_broken_off_and_nothing_follows(tmp_path: object) -> None:
    (folder := f"{tmp_path}/slow")  # a package whose import takes a signal
    body = f"""
os.makedirs({folder!r})
sys.path.insert(0, {folder!r})
with open({folder!r} + "/slow.py", "w") as file:
    file.write("import os, signal; os.kill(os.getpid(), signal.SIGINT); whole = 1")
try:
    import slow
    print("goes on")
finally:
    print(sys.modules["slow"].whole)
"""
    assert ended(body) == (130, "1\n", "interrupted\n")


def test_a_second_ctrl_c_ends_at_once_in_a_call_that_hears_nothing() -> None:
    """The first comes when the call is under way, the second after the words."""
    body = """
import hashlib, threading

def first():
    while main.f_lineno != call:
        time.sleep(0.01)
    send()

def words(say=signals._say_when):
    say()
    send()

signals._say_when = words
main, call = sys._getframe(), 0
threading.Thread(target=first, daemon=True).start()
call = main.f_lineno + 1
hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""
    code, out, err = ended(body)
    assert (code, out) == (130, "")
    assert "ending after the call under way; Ctrl-C ends at once" in err
    assert err.endswith("ended at once\n")


@pytest.mark.parametrize("compiles", [True, False])
def test_sigterm_does_not_wait_for_a_compile(compiles: bool) -> None:
    """A step that hears nothing ends all the same: its checkpoint is to be kept."""
    body = f"""
import hashlib, threading

signals._PATIENCE = 0.2
signals.mind_compiles(lambda: {compiles})
main, call = sys._getframe(), 0

def first():
    while main.f_lineno != call:
        time.sleep(0.01)
    send(signal.SIGTERM)

threading.Thread(target=first, daemon=True).start()
call = main.f_lineno + 1
hashlib.pbkdf2_hmac("sha256", b"", b"", {2_000_000_000 if compiles else 4_000_000})
"""
    code, out, err = ended(body)
    assert (code, out) == (143, "")
    assert err.endswith("\nterminated in a compile\n" if compiles else "terminated\n")


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_keeps_nothing_does_not_wait_for_a_call(
    signum: signal.Signals, tmp_path: Path
) -> None:
    """What the command printed is out, and what it has not finished goes."""
    body = f"""
import hashlib, pathlib, threading
from tpuport.core.files.atomic import new_folder, replacing, scratch_folder

signals._SOON = 0.2
signals.keep_nothing()
main, call = sys._getframe(), 0

def first():
    while main.f_lineno != call:
        time.sleep(0.01)
    send({int(signum)})

place = pathlib.Path({str(tmp_path)!r})
print("begun")
with (
    scratch_folder(place=place) as scratch,
    new_folder(place / "built") as built,
    replacing(place / "video"),
):
    (scratch / "file").touch()
    (built / "file").touch()
    threading.Thread(target=first, daemon=True).start()
    call = main.f_lineno + 1
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""
    word = "interrupted" if signum == signal.SIGINT else "terminated"
    assert ended(body) == (128 + signum, "begun\n", f"\n{word}\n")
    assert [*tmp_path.iterdir()] == []


def test_a_command_ends_while_it_prints_and_nobody_reads() -> None:
    """The write of a thread holds the stream, which cannot be flushed."""
    body = """
    import hashlib, threading
    signals._SOON = 0.2
    signals.keep_nothing()
    write = lambda: sys.stdout.write("." * 10_000_000)
    threading.Thread(target=write, daemon=True).start()
    threading.Timer(0.2, send, [signal.SIGTERM]).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
"""
    program = HEARD + PROGRAM.format(body=body.strip())
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=buffered(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        try:
            assert run.wait(60) == 143
        finally:
            run.kill()


#: A command whose import of the libraries hears no signal, as a compile.
COMMAND = """
import hashlib, os, signal, sys, threading
from tpuport.cli.asked import environment
from tpuport.cli.shown import signals

def deaf(*_):
    kill = lambda: os.kill(os.getpid(), signal.SIGTERM)
    threading.Timer(0.1, kill).start()
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)

environment.import_libraries = deaf
signals._SOON = 0.2
from tpuport.cli import main
sys.argv = ["tpuport", {command}]
main()
"""


@pytest.mark.parametrize(
    "command",
    [
        ("check", "wan", "--no-plan"),
        ("new-model", "mine", "--class", "WanPipeline"),
        ("plan", "--model", "wan", "--topology", "v6e-8"),
        ("compile", "--model", "wan", "--topology", "cpu-1", "--out", "built"),
    ],
)
def test_commands_that_only_compile_end_at_once(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    program = HEARD + COMMAND.format(command=", ".join(map(repr, command)))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.splitlines()[-1:]) == (143, ["terminated"])
    assert [*tmp_path.iterdir()] == []


def test_what_is_ignored_stays_ignored() -> None:
    """As by nohup, before the program begins."""
    program = PROGRAM.format(body="send(signal.SIGHUP)")
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)" + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"at its end\n")


#: Ctrl-C while the program looks for a module, or while it starts its first thread.
EARLY = """
import os, signal, sys, threading

def send(name="", *_):
    if name in ("tpuport.cli.shown", {started!r}):
        os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, type("Sends", (), {{"find_spec": send}}))
if {started!r}:
    threading.Thread.start = lambda self: send({started!r})
    sys.meta_path.pop(0)
from tpuport.cli import main
sys.argv = ["tpuport", "--version"]
main()
"""


@pytest.mark.parametrize("started", ["", "thread"])
def test_ctrl_c_before_the_first_command_is_imported(started: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HEARD + EARLY.format(started=started)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_little_is_imported_before_signals_are_minded() -> None:
    program = (
        "import sys; before = {*sys.modules}; import tpuport.cli as _; "
        "print(*sorted({*sys.modules} - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    # What `signal` itself imports is imported by now: an editable install needs it.
    few = {"__future__", "collections.abc", "signal", "tpuport", "tpuport.cli"}
    assert {*done.stdout.split()} <= few


@pytest.mark.parametrize("ignored", [False, True])
def test_main_leaves_sigint_as_it_was(ignored: bool, handlers: list[object]) -> None:
    del handlers  # put back afterwards
    before = signal.SIG_IGN if ignored else signal.default_int_handler
    signal.signal(signal.SIGINT, before)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["tpuport", "--version"])
        patch.setattr("gc.freeze", lambda: None)
        assert main() == 0
    assert signal.getsignal(signal.SIGINT) is before


@pytest.fixture
def handlers() -> Iterator[list[object]]:
    """The handlers of the tests' own process, which are put back."""
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    yield [*before]
    for signum, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
        signal.signal(signum, handler)


def test_many_programs_in_a_process_leave_nothing(handlers: list[object]) -> None:
    def run() -> int:
        assert signal.getsignal(signal.SIGINT) is not handlers[0]
        return 3

    signal.signal(signal.SIGINT, signal.default_int_handler)
    handlers = [signal.default_int_handler, handlers[1]]
    before = threading.active_count()
    for _ in range(40):
        assert signals.as_program(run) == 3
    found = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)]
    assert found == handlers
    assert signal.set_wakeup_fd(-1) == -1
    for thread in threading.enumerate():
        if thread.name.endswith("(_watch)"):
            thread.join(60)
    assert threading.active_count() <= before
