"""One run over several processes: where this one is, and how all of them end."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import fields, replace

import tpuport
from tpuport.cli.asked.settings import TABLE, Settings
from tpuport.core.files.fingerprint import versions
from tpuport.core.mesh.hosts import WAIT, Address, HostError, leave, meet
from tpuport.errors import TpuportError, UsageError, in_one_line

#: What each process may have for itself: places on its own disk, and what it shows.
_OWN = frozenset(
    (
        *("distributed", "coordinator", "num_processes", "process_id"),
        *("cache_dir", "cache_store"),
        *("run_dir", "out", "overwrite", "report", "checkpoint_every", "executables"),
        *("preview", "profile", "profile_calls", "json", "debug", "read_from"),
        *("config", "latents"),
    )
)
#: Variables that change what the compiler makes; and those of jax that do not.
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PLACES = (
    *("JAX_COMPILATION_CACHE_DIR", "JAX_COORDINATOR_ADDRESS", "JAX_PROCESS_ID"),
    *("JAX_COORDINATOR_BIND_ADDRESS", "JAX_LOCAL_DEVICE_IDS", "JAX_DUMP_IR_TO"),
    *("JAX_PARTITION_INDEX", "JAX_SLICE_INDEX"),
)


@contextlib.contextmanager
def joined(settings: Settings) -> Iterator[Settings]:
    """Run the block on all processes of a run, if the settings name others.

    All but process 0 are quiet until an error, and write no file of the user's. An
    error on one ends all.

    Yields:
        the settings of this process.
    """
    at = _address(settings)
    if at is None or at.count == 1:
        yield settings
        return
    if settings.preview:
        raise UsageError("--preview: not for a run over several processes")
    hosts = meet(at, about(settings), hosts_wait())
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_gloos_lines())
            if not hosts.first:
                nowhere = stack.enter_context(open(os.devnull, "w"))
                stack.enter_context(contextlib.redirect_stdout(nowhere))
                stack.enter_context(contextlib.redirect_stderr(nowhere))
            yield settings if hosts.first else _of_another(settings)
            hosts.over()
            _leave_jax()
        hosts.close()
        leave()
    except BaseException as error:
        if why := hosts.lost_by(error):
            ended = HostError(why)
            for note in getattr(error, "__notes__", ()):
                ended.add_note(note)
            raise ended from error
        hosts.failed(_words(error))
        raise


@contextlib.contextmanager
def _without_gloos_lines() -> Iterator[None]:
    """Keep for Python what the library of CPUs' collectives prints to: stdout."""
    sys.stdout.flush()
    own = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        with contextlib.ExitStack() as stack:
            if sys.stdout is sys.__stdout__:
                file = stack.enter_context(open(os.dup(own), "w"))
                stack.enter_context(contextlib.redirect_stdout(file))
            yield
    finally:
        os.dup2(own, 1)
        os.close(own)
        os.close(nowhere)


def _leave_jax() -> None:
    import jax

    jax.distributed.shutdown()


def _words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted or terminated"
    own = isinstance(error, TpuportError)
    return in_one_line(error if own else f"{type(error).__name__}: {error}", 160)


def _of_another(settings: Settings) -> Settings:
    """Settings for a process that writes nothing."""
    return replace(
        settings,
        out=None,
        report=None,
        profile=None,
        profile_calls=None,
        preview=False,
    )


def about(settings: Settings) -> dict[str, str]:
    """What all processes must have alike, in words by name."""
    known = {
        "tpuport": tpuport.__version__,
        "Python": platform.python_version(),
        **{name: str(version) for name, version in versions("libtpu").items()},
    }
    set_here = {name for name in os.environ if name.startswith("JAX_")}
    for name in set_here.union(_VARIABLES).difference(_PLACES):
        known[name] = os.environ.get(name, "not set")
    for one in fields(settings):
        if one.init and one.name not in _OWN:
            name = TABLE[one.name].flags[0] if one.name in TABLE else one.name
            known[name] = str(getattr(settings, one.name))
    return known


def _address(settings: Settings) -> Address | None:
    """Where this process is; ``None`` for a run of one."""
    flags = {
        "--coordinator": settings.coordinator,
        "--num-processes": settings.num_processes,
        "--process-id": settings.process_id,
    }
    missing = [name for name, value in flags.items() if value is None]
    if len(missing) == len(flags):
        return _of_cluster() if settings.distributed else None
    if missing:
        raise UsageError(
            f"{' and '.join(missing)} missing: --coordinator, --num-processes and "
            "--process-id go together; --distributed alone finds all three"
        )
    assert settings.coordinator is not None
    assert settings.num_processes is not None
    assert settings.process_id is not None
    if settings.process_id >= settings.num_processes:
        raise UsageError(
            f"--process-id {settings.process_id}: {settings.num_processes} processes "
            f"have the numbers 0 to {settings.num_processes - 1}"
        )
    return Address(settings.coordinator, settings.num_processes, settings.process_id)


def _of_cluster() -> Address:
    """What jax finds out on Cloud TPU, SLURM, Open MPI and Kubernetes."""
    from jax._src.clusters import ClusterEnv

    find = ClusterEnv.auto_detect_unset_distributed_params
    try:
        address, count, number, _ = find(
            None, None, None, None, None, int(hosts_wait())
        )
    except Exception as error:
        raise UsageError(
            f"--distributed: what jax asks of the cluster fails ({error}); name "
            "--coordinator, --num-processes and --process-id"
        ) from error
    if address is None or count is None or number is None:
        raise UsageError(
            "--distributed: this is no Cloud TPU, SLURM, Open MPI or Kubernetes job "
            "that jax knows; name --coordinator, --num-processes and --process-id"
        )
    host, _, port = address.rpartition(":")
    return Address((host, int(port)), count, number)


def hosts_wait() -> float:
    """Seconds that processes of a run wait for each other at the start."""
    text = os.environ.get("TPUPORT_HOSTS_WAIT", str(WAIT))
    try:
        return max(float(text), 1.0)
    except ValueError:
        raise UsageError(
            f"TPUPORT_HOSTS_WAIT={text!r} is no number of seconds"
        ) from None
