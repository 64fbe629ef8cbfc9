"""How a signal ends the program: with a word on what is kept, and the code 128 + n.

Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread, but not while
modules are imported: jaxlib and torch crash when their import is broken off. Libraries
swallow exceptions, raise others in their place, and install handlers of their own. So
the signal is remembered. The code that imports raises after the import,
:func:`check` raises again at the next step, :func:`ended_by` gives the signal whatever
was raised, and the exit code is always the signal's.

Only the program itself has these handlers: a call of ``main`` from Python has none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import NoReturn

from tpuport.core.files.atomic import remove_unfinished
from tpuport.core.mesh.hosts import here

#: Signals that ask the program to end, and what a person reads.
_WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "terminated",
    signal.SIGHUP: "hung up",
}

#: Seconds in which a second SIGINT counts as the first one: `timeout` sends two.
_TWICE = 0.3

#: Seconds after which other signals end a compile: a host that goes away waits 5 to 30.
_PATIENCE = 4.0

#: The same, of a command that has nothing to keep; after Ctrl-C too.
_SOON = 1.0

#: Functions in which Python prints an error and goes on.
_FINALISERS = ("__del__", "_xla_gc_callback")

#: Shows the cursor of a terminal again; a moving line hides the cursor.
_CURSOR = "\x1b[?25h"

#: The first signal that asked the program to end.
_received: signal.Signals | None = None
_armed: list[signal.Signals] = []
#: Whether a compile is under way, which hears no signal, and has nothing to be kept.
_compiles: Callable[[], bool] = bool
#: Whether the command has nothing to keep.
_keeps_nothing = False
#: The arguments of :func:`starting` while its block runs.
_starting, _before = False, ""


def ended_by(error: BaseException | None = None) -> signal.Signals | None:
    """The signal that ends the program, whatever error the signal became."""
    if _received is None and isinstance(error, KeyboardInterrupt):
        return signal.SIGINT
    return _received


def in_words(signum: signal.Signals) -> tuple[int, str]:
    """The exit code of a program that a signal ended, as in a shell, and the word."""
    return 128 + signum, _WORDS[signum]


def check() -> None:
    """Take handlers back, and raise a signal that was swallowed; called at every step.

    Raises:
        KeyboardInterrupt: a signal asked the program to end.
        HostError: another process of the run is lost.
    """
    for signum in _armed:
        signal.signal(signum, _stop)
    if _received is not None:
        raise KeyboardInterrupt
    here().check()


@contextlib.contextmanager
def starting(before: str = "") -> Iterator[None]:
    """A block of imports: nothing is to be kept yet, so a signal ends at once.

    Args:
        before: written before the word for the signal, such as the end of a line.

    Raises:
        KeyboardInterrupt: a signal has asked the program to end.
    """
    global _starting, _before
    check()
    _starting, _before = True, before
    try:
        yield
    finally:
        _starting, _before = False, ""


def mind_compiles(under_way: Callable[[], bool]) -> None:
    """Tell how to see that a compile is under way; another thread asks."""
    global _compiles
    _compiles = under_way


def keep_nothing() -> None:
    """Tell that the command under way writes nothing that is to be kept in part.

    Every signal ends the command at once, in a compile too.
    """
    global _keeps_nothing
    _keeps_nothing = True


def as_program(run: Callable[[], int]) -> int:
    """Run a program that signals end as this module says.

    Returns:
        the exit code of ``run``. After a signal the process ends instead: see
        :func:`leave`.
    """
    if threading.current_thread() is not threading.main_thread():
        return run()
    with starting():
        # Ignored signals stay ignored: nohup, or a job in the background of a script.
        _armed.extend(s for s in _WORDS if signal.getsignal(s) != signal.SIG_IGN)
        handlers = {signum: signal.signal(signum, _stop) for signum in _armed}
        seen, told = os.pipe()
        os.set_blocking(told, False)
        before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
        _mind_forks()
        threading.Thread(target=_watch, args=(seen,), daemon=True).start()
    code = 0
    try:
        code = run()
    except BaseException:
        if _received is None:
            raise
    finally:
        if _received is not None:
            # No error told of the signal: something swallowed the last one.
            _leave(*in_words(_received))
        _armed.clear()
        signal.set_wakeup_fd(before)
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        os.close(told)  # which ends the watch
    return code


def leave() -> None:
    """End the program at once if a signal asked for the end; the words are out.

    The error still holds what the signal broke off, such as half of a compile, and
    threads of the compiler and of devices may be at work. The process crashes when the
    error is freed, or when the interpreter shuts down under the threads.
    """
    if _received is not None:
        _leave(in_words(_received)[0])


def _stop(signum: int, frame: FrameType | None) -> None:
    global _received
    if _received is not None:
        return
    _received = signal.Signals(signum)
    if _starting:
        code, word = in_words(_received)
        _leave(code, _before + word)
    caller = _raises(frame)
    if caller is frame:
        raise KeyboardInterrupt
    if caller is not None:
        caller.f_trace = _raise_here
        sys.settrace(_trace_nothing)


def _raises(frame: FrameType | None) -> FrameType | None:
    """The frame that may raise: what called the outermost frame that must not.

    An import, a finaliser and jax's callback of the collector must not raise.
    """
    found = frame
    while frame is not None:
        code, frame = frame.f_code, frame.f_back
        if "importlib" in code.co_filename or code.co_name in _FINALISERS:
            found = frame
    return found


def _raise_here(*_: object) -> NoReturn:
    """End the program at the next line of a frame that has this trace function."""
    sys.settrace(None)
    raise KeyboardInterrupt


def _trace_nothing(*_: object) -> None:
    """Leave new frames without a trace; those that have one are traced."""


def _watch(seen: int) -> None:
    """End the program while the main thread is in a call: at the second Ctrl-C.

    Python runs handlers between two steps of the main thread; a compile is one step,
    and other signals do not wait for the end of a compile.
    """
    first: float | None = None
    while numbers := os.read(seen, 64):
        for signum in set(numbers) & _WORDS.keys():
            now = time.monotonic()
            if _keeps_nothing:
                _after(_SOON, functools.partial(_end_anyway, signum))
            elif signum != signal.SIGINT:
                _after(_PATIENCE, functools.partial(_end_compile, signum))
            if first is None:
                first = now
                _after(1, _say_when)
            elif signum == signal.SIGINT and now > first + _TWICE:
                os.write(2, f"{_cursor()}\nended at once\n".encode())
                os._exit(in_words(signal.SIGINT)[0])
    os.close(seen)


def _after(seconds: float, call: Callable[[], None]) -> None:
    later = threading.Timer(seconds, call)
    later.daemon = True
    later.start()


def _end_compile(signum: int) -> None:
    """End the program in a compile. Files are whole, and checkpoints are written."""
    if _received is None and _compiles():
        _end_anyway(signum, " in a compile")


def _end_anyway(signum: int, where: str = "") -> None:
    """End the program, which may be in a call that hears no signal."""
    code, word = in_words(signal.Signals(signum))
    remove_unfinished()
    # The call under way may be a write that waits for its reader, and holds the stream.
    flush = threading.Thread(target=_flush, daemon=True)
    flush.start()
    flush.join(1)
    os.write(2, f"{_cursor()}\n{word}{where}\n".encode())
    os._exit(code)


def _flush() -> None:
    """Write out what was printed. The terminal may be gone."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()


def _cursor() -> str:
    return _CURSOR if os.isatty(2) else ""


def _say_when() -> None:
    if _received is None and not _keeps_nothing:
        os.write(2, b"\nending after the call under way; Ctrl-C ends at once\n")


@functools.cache
def _mind_forks() -> None:
    os.register_at_fork(after_in_child=_let_go)


def _let_go() -> None:
    """Give a forked process the system's own handlers."""
    if _armed:
        signal.set_wakeup_fd(-1)
    while _armed:
        signal.signal(_armed.pop(), signal.SIG_DFL)


def _leave(code: int, word: str = "") -> NoReturn:
    """End the process. The terminal may be gone."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write(_CURSOR)
        if word:
            print(word, file=sys.stderr)
    _flush()
    os._exit(code)
