"""Eight virtual CPU devices for every test, set before jax is imported."""

from __future__ import annotations

import os
import sys

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before tests/conftest.py could set it up")
os.environ["JAX_PLATFORMS"] = "cpu"
# XLA's optimisations for CPUs take most of a test's time and nearly none of what is
# tested; models/shared/test_optimised.py runs programs compiled as they are for users.
# Flags that the user has set come later and win.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_use_fusion_emitters=false",
        # Parts of a program for threads to compile; a test process has one core.
        "--xla_cpu_parallel_codegen_split_count=1",
        *os.environ.get("XLA_FLAGS", "").split(),
        "--xla_force_host_platform_device_count=8",
    ]
)
# A test process for each core: threads of torch would only wait for one another.
os.environ["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
# A hub that is never asked: every checkpoint of the tests is made by the tests.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import fcntl
import gc
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

from tests.processes import Once

# Nothing is garbage while test files are imported: pytest_collection_finish.
gc.disable()

# Shapes of arrays are checked in tests alone, from here on: nothing of tpuport is
# imported yet.
install_import_hook(["tpuport.core.layers", "tpuport.kernels"], "beartype.beartype")

#: The files that take minutes, longest first; those that start many processes have
#: others between them, so that the processes of two do not wait for one another.
LONGEST = (
    "cli/server/test_serve.py",
    "pipelines/test_examples.py",
    "house/test_examples.py",
    "models/hunyuanvideo/test_videos.py",
    "house/test_readme.py",
    "models/cogvideox/vae/test_tpu.py",
    "cli/batches/test_ray.py",
    "cli/commands/test_plan.py",
    "cli/commands/test_many_hosts.py",
    "cli/commands/test_generate.py",
    "cli/server/test_clients.py",
    "cli/server/test_page.py",
    "cli/server/test_actors.py",
)


def pytest_collection_finish() -> None:
    """What the libraries made at import stays: the collector need not look at it.

    Nor need it look as often as by default at what a trace makes, nearly all of which
    lives until the trace ends: a tenth of the time of tests that trace went there.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: none is left for one process while the other waits."""
    rank = {Path(__file__).parent / name: n for n, name in enumerate(LONGEST)}
    if missing := [str(path) for path in rank if not path.exists()]:
        raise pytest.UsageError(f"LONGEST names files that are gone: {missing}")
    items.sort(key=lambda item: rank.get(item.path, len(LONGEST)))


def _seed() -> None:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


def pytest_collectstart() -> None:
    """What a file draws at its import is the same whatever was imported before."""
    _seed()


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """A test draws the same numbers whatever ran before in its process."""
    _seed()


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Makes a folder for all test processes of a run: the first one to ask does."""
    base = tmp_path_factory.getbasetemp()
    place = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def get(name: str, make: Callable[[Path], object]) -> Path:
        folder, done = place / name, place / f"{name}.made"
        with (place / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                done.touch()
        return folder

    return get


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The demo checkpoint of the package. Tests that alter it work on a copy."""
    from tpuport.plugins import folder_of, get_model

    found = get_model("cogvideox").variants["demo"].folder(folder_of("cogvideox"))
    assert found is not None
    return found


@pytest.fixture(scope="session")
def hunyuanvideo_folders(once: Once) -> dict[str, Path]:
    """The demo checkpoints: ``"1.5"``, ``"13b"``, ``"1.5-i2v"`` and ``"13b-i2v"``."""
    from tpuport.core.pipelines.stand_in import write_random
    from tpuport.plugins import folder_of, get_model

    def made(model: str, variant: str) -> Path:
        configs = get_model(model).variants[variant].read(folder_of(model))
        return once(f"{model}-{variant}", lambda folder: write_random(folder, configs))

    return {
        form + task: made(model, f"demo{task}")
        for form, model in (("1.5", "hunyuanvideo"), ("13b", "hunyuanvideo-13b"))
        for task in ("", "-i2v")
    }


@pytest.fixture(scope="session")
def cache_dir(once: Once) -> Path:
    """In place of the user's cache folder: one store of programs for all tests.

    Files of the store appear whole and are named by their content, so test processes
    share them as two commands of a user do.
    """
    return once("cache", lambda folder: None)
