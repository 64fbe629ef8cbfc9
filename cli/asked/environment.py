"""What is set before jax and torch are imported, and the cache folder."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import platformdirs

from tpuport.cli.shown import signals
from tpuport.core.files.atomic import cannot_write, no_room
from tpuport.core.files.folders import check_folder
from tpuport.core.files.stores import FETCHED
from tpuport.core.mesh import coordinator
from tpuport.core.mesh.hosts import here
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import Topology, check_libtpu, compile_environment
from tpuport.core.reports import Reporter
from tpuport.core.run.progress import Display
from tpuport.core.spec.run_settings import COMPILED, DEMO, RunSettings
from tpuport.errors import OutputError

#: Device files of TPUs (two driver generations) and of NVIDIA GPUs.
_ACCELERATORS = ("accel*", "vfio/[0-9]*", "nvidia0")

#: The meshes that ``tpuport check`` tries; the last if a plugin has a layout for tp.
MESHES = (MeshSpec(), MeshSpec(dp=2, sp=2), MeshSpec(sp=2, tp=2))
#: Devices for these, and compiles for CPUs in half the time. For TPUs nothing changes.
_SMALL_MESHES = (
    f"--xla_force_host_platform_device_count={max(mesh.size for mesh in MESHES)}",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
)

#: Read by the libraries when they are imported. What the user set stays.
_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "GRPC_VERBOSITY": "NONE",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "DIFFUSERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
}
_LOGGERS = ("absl", "jax", "torchax", "torch", "imageio", "imageio_ffmpeg", "gcsfs")

#: Of a cache folder: unfinished runs of batches whose videos go to a store.
BATCHES = "batches"

#: The folders in the cache folder that commands write to.
_FOLDERS = (
    *(COMPILED, DEMO, "runs", "kernels", "schedules", "previews", FETCHED),
    BATCHES,
)


#: What every run imports sooner or later, and what takes long of that.
_LIBRARIES = (
    "jax",
    "transformers.modeling_utils",
    "diffusers.models.modeling_utils",
    "tpuport.core.seam.ported",
)

DEFAULT_MODEL = "cogvideox"
"""What is taken when no model is named."""


def default_cache_dir() -> Path:
    """The user's cache folder: programs, small checkpoints, unfinished runs."""
    return Path(platformdirs.user_cache_dir("tpuport"))


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Whether the machine has a TPU or a GPU, told by its device files."""
    return any(any(devices.glob(pattern)) for pattern in _ACCELERATORS)


def prepare(*, debug: bool = False) -> None:
    """Set the process up for a command; called before jax or torch is imported.

    On a machine without an accelerator jax would look for one and say that there is
    none, so it is told to use the CPU. Chatter of the libraries is turned off: what a
    person reads is tpuport's own lines. ``debug`` leaves it on.
    """
    if "JAX_PLATFORMS" not in os.environ and not has_accelerator():
        os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if debug:
        return
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    for name in _LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            # gcsfs logs the traceback of what it raises.
            level = logging.CRITICAL if name == "gcsfs" else logging.ERROR
            logger.setLevel(level)
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def prepare_small_meshes() -> None:
    """CPU devices for a small mesh, before jax is imported; what the user set wins."""
    if "jax" not in sys.modules:
        flags = [*_SMALL_MESHES, os.environ.get("XLA_FLAGS", "")]
        os.environ["XLA_FLAGS"] = " ".join(flags).strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")


def prepare_topology(topology: Topology) -> None:
    """Set this process up to compile for a slice that is not there.

    Called before jax is imported. What the user set stays. libtpu reads the variables
    when it is loaded, once in a process.
    """
    check_libtpu(topology)
    for name, value in compile_environment(topology).items():
        os.environ.setdefault(name, value)


def import_libraries(reporter: Reporter) -> None:
    """Import torch, jax and diffusers, which takes seconds; Ctrl-C ends at once.

    Nothing is garbage while modules are imported, and looking for it takes a seventh of
    the time.
    """
    if set(_LIBRARIES) <= sys.modules.keys():
        return
    collects = gc.isenabled()
    gc.disable()
    what = "importing torch, jax and diffusers"
    try:
        with signals.starting(before="\n"), reporter.timed(what):
            for name in _LIBRARIES:
                importlib.import_module(name)
    finally:
        if collects:
            gc.enable()


@contextlib.contextmanager
def running(settings: RunSettings, display: Display | None = None) -> Iterator[Display]:
    """What shows a run; modules that need torch and jax are imported in the block.

    Args:
        settings: name the cache, which must be writable.
    """
    check_cache(settings)
    with display or Display(signals.check) as shown:
        signals.mind_compiles(shown.compiles)
        import_libraries(shown)
        if (hosts := here()).several:
            with shown.timed(f"joining {hosts.at.count} processes"):
                coordinator.join(hosts)
        yield shown


@contextlib.contextmanager
def looking(what: str) -> Iterator[None]:
    """Say what takes seconds: mostly imports, after which nothing is written."""
    with Display() as display, display.timed(what), signals.starting(before="\n"):
        yield


def check_cache(settings: RunSettings) -> Path:
    """The cache folder of this machine; it and the store are known to be writable."""
    if settings.cache_store is not None:
        settings.cache_store.check_writable()
    return cache_folder(settings.cache_dir)


def cache_folder(asked: Path | None) -> Path:
    """The cache folder asked for or the user's own, made and known to be writable."""
    folder = asked or default_cache_dir()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        if no_room(error):
            raise cannot_write(folder, error) from error
        raise OutputError(
            f"the cache folder {folder} cannot be written: {error.strerror}; choose "
            "another with --cache-dir or TPUPORT_CACHE_DIR"
        ) from error
    for name in _FOLDERS:
        check_folder("--cache-dir", folder / name)
    return folder
