"""Test processes: what they share, those that start quickly, and those for TPUs.

Imports take longer than most of what the tests run in processes of their own. Such a
process is a fork of one that has imported those libraries and done nothing else: no
device and no compiler was asked for, so that both read the environment given here.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

#: ``once(name, make)``: a folder that the first test process to ask for it makes.
Once = Callable[[str, Callable[[Path], object]], Path]

#: What is imported before the fork. None of them asks jax for a device.
IMPORTED = [
    "jax.experimental.pallas.tpu",
    "jax.experimental.topologies",
    "diffusers.models.autoencoders.autoencoder_kl_cogvideox",
    "diffusers.pipelines.pipeline_utils",
    "tpuport.core.plan.pipeline_plan",
    "tpuport.models.cogvideox.plugin",
    "tpuport.models.hunyuanvideo.plugin",
]

#: Seconds that a process may take, on a busy machine too.
LONGEST = 1800

#: Variables that the libraries read when they are imported start with these.
READ_AT_IMPORT = ("JAX_", "PYTHON", "TORCH", "HF_", "OMP_", "DIFFUSERS_")


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """How a process ended.

    Attributes:
        returncode: its exit status; negative for a signal.
        stdout, stderr: what it printed.
    """

    returncode: int
    stdout: str
    stderr: str


_context: ForkServerContext | None = None


def _server() -> ForkServerContext:
    """The process to fork, which starts with the first one that is asked for."""
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(IMPORTED)
    return _context


def run_python(
    args: Sequence[str],
    *,
    environment: Mapping[str, str],
    folder: Path | None = None,
) -> Done:
    """``python -c program ...`` or ``python -m module ...`` in a process of its own.

    Args:
        args: ``-c`` or ``-m``, what goes with it, and the program's own arguments.
        environment: the whole environment. Variables that the libraries read when
            they are imported are those of this process.
        folder: its current folder; ``None`` for this process's.

    Raises:
        ValueError: a variable of ``READ_AT_IMPORT`` differs from this process's.
        TimeoutError: it took longer than ``LONGEST``.
    """
    return Running(args, environment, folder).done()


class Running:
    """A process as of :func:`run_python`, begun.

    Args:
        args, environment, folder: as there.
    """

    def __init__(
        self,
        args: Sequence[str],
        environment: Mapping[str, str],
        folder: Path | None = None,
    ) -> None:
        _check_environment(environment)
        self._place = tempfile.TemporaryDirectory()
        self._out, self._err = (
            Path(self._place.name, name) for name in ("stdout", "stderr")
        )
        given = (list(args), dict(environment), folder or Path.cwd())
        self.process: BaseProcess = _server().Process(
            target=_run, args=(*given, self._out, self._err)
        )
        self.process.start()

    def poll(self) -> int | None:
        """The exit status once the process has ended; negative for a signal."""
        return self.process.exitcode

    def send_signal(self, signum: signal.Signals) -> None:
        os.kill(self.process.pid or 0, signum)

    def done(self, patience: float = LONGEST) -> Done:
        """How the process ended, once it has.

        Raises:
            TimeoutError: it took longer than ``patience`` seconds, and was killed.
        """
        self.process.join(patience)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise TimeoutError(f"over {patience} s: {self._err.read_text()}")
        out, err = self._out.read_text(), self._err.read_text()
        return Done(returncode=self.process.exitcode, stdout=out, stderr=err)


def _check_environment(environment: Mapping[str, str]) -> None:
    for name in {*environment, *os.environ}:
        differs = environment.get(name) != os.environ.get(name)
        if name.startswith(READ_AT_IMPORT) and name != "PYTHONPATH" and differs:
            raise ValueError(f"{name} was read when the libraries were imported")


def _run(
    args: list[str], environment: dict[str, str], folder: Path, out: Path, err: Path
) -> None:
    # As a shell starts a program, also if this process ignores a signal.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    for stream, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, stream)
        os.close(opened)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    kind, program, *rest = args
    sys.argv = [kind, *rest]
    try:
        if kind == "-m":
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            return
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        exec(compile(program, "<string>", "exec"), vars(module))
    finally:
        atexit._run_exitfuncs()  # which a fork's end leaves out


# ------------------------------------------------- the TPU compiler, once a process

ROOT = Path(__file__).resolve().parents[1]

#: What jax.experimental.topologies and libtpu want where there is no TPU. The last but
#: one lets two compilers run on one machine; none of the flags that make CPU programs
#: quick to compile (``conftest.py``) reaches the compiler for TPUs.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def run_program(program: str, *args: str, **variables: str) -> list[str]:
    """The lines that a program prints, with the tests' modules on its path.

    ``variables`` are of the environment, and win over ``ENVIRONMENT``.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = run_python(
        ["-c", program, *args],
        environment=os.environ | ENVIRONMENT | {"PYTHONPATH": path} | variables,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def run_json(program: str, *args: str, **variables: str) -> dict[str, Any]:
    """The document in the last line that a program prints."""
    lines = run_program(program, *args, **variables)
    found: dict[str, Any] = json.loads(lines[-1])
    return found
