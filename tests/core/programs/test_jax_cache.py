"""The persistent cache: on in its block, jax's settings put back, hits counted."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import fsspec
import jax
import jax.numpy as jnp
import pytest

from tests.core.files.runs import failing
from tests.processes import needs_libtpu, run_program
from tpuport.core.files import stores
from tpuport.core.files.stores import StorePath
from tpuport.core.mesh.slices import compile_environment, parse_topology
from tpuport.core.programs import jax_cache as compiling
from tpuport.core.programs.jax_cache import cache_hits, persistent_cache, uncached
from tpuport.errors import ArtifactError


def settings() -> dict[str, object]:
    names = (*compiling._SETTINGS, "jax_compilation_cache_dir")
    return {name: getattr(jax.config, name) for name in names}


def compile_once(factor: float) -> None:
    """A program of its own, compiled although this process may know it."""
    jax.clear_caches()
    argument = jax.ShapeDtypeStruct((3,), jnp.float32)
    jax.jit(lambda x: x * factor + 1).lower(argument).compile()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*-cache")}


def test_a_second_compile_comes_out_of_the_cache(tmp_path: Path) -> None:
    folder, other = tmp_path / "deep" / "cache", tmp_path / "other"
    with persistent_cache(folder):
        before = cache_hits()
        compile_once(0.125)
        first = cache_hits()
        (name,) = names(folder)  # small and quick programs are kept too
        compile_once(0.125)
        assert (first - before, cache_hits() - first) == (0, 1)
        with persistent_cache(other):  # caches nest
            compile_once(0.125)
        # By default jax puts the path of the folder into the key.
        assert names(other) == {name}
        compile_once(0.375)
        assert cache_hits() - first == 1
    compile_once(0.375)  # nothing is kept or found after the block
    assert (len(names(folder)), cache_hits() - first) == (2, 1)
    with persistent_cache(folder):  # as another process would
        compile_once(0.375)
        assert cache_hits() - first == 2
        with uncached():
            compile_once(0.375)
            compile_once(0.3125)
        assert (len(names(folder)), cache_hits() - first) == (2, 2)
        compile_once(0.375)
        assert cache_hits() - first == 3


def test_programs_in_a_store_are_those_of_every_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(stores.SCHEMES, "memory", ("fsspec", "none"))
    store, before, hits = StorePath("memory", "programs"), settings(), cache_hits()
    with persistent_cache(store) as failures:
        compile_once(0.15625)
    (name,) = store.files()
    assert name.endswith("-cache")
    with persistent_cache(store):
        with persistent_cache(tmp_path / "here"):
            compile_once(0.15625)
        compile_once(0.15625)
    assert cache_hits() == hits + 1
    assert names(tmp_path / "here") == {name}
    # What is damaged is compiled, and put again.
    whole = (store / name).read_bytes()
    (store / name).write_bytes(whole[:9])
    with persistent_cache(store), warnings.catch_warnings(action="ignore"):
        compile_once(0.15625)
    assert cache_hits() == hits + 1
    assert len((store / name).read_bytes()) > 9
    assert (failures, settings()) == ([], before)

    # A store that fails in mid-run costs a compile, and the reason is known.
    def breaks(*_: object, **__: object) -> None:
        raise ConnectionResetError("reset")

    memory = type(fsspec.filesystem("memory"))
    monkeypatch.setattr(memory, "cat_file", breaks)
    monkeypatch.setattr(memory, "pipe_file", breaks)
    with persistent_cache(store) as failures:
        compile_once(0.15625)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    first, second = failures
    assert f"{store / name}: cannot be read (ConnectionResetError" in first
    assert "cannot be written" in second


def test_programs_in_a_folder_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, persistent_cache(tmp_path):
        patch.setattr(os, "replace", failing)  # as where the process ends before
        with pytest.warns(match="cannot be written"):
            compile_once(0.1875)
    assert [*tmp_path.iterdir()] == []
    with persistent_cache(tmp_path), warnings.catch_warnings(action="ignore"):
        compile_once(0.1875)
        (name,) = names(tmp_path)
        whole = (tmp_path / name).read_bytes()
        # What other software cut is compiled, and written again.
        (tmp_path / name).write_bytes(whole[:9])
        compile_once(0.1875)
        assert len((tmp_path / name).read_bytes()) > 9
        before = cache_hits()
        compile_once(0.1875)
    assert cache_hits() == before + 1


@pytest.mark.parametrize("folder", ["cache", None])
def test_the_settings_of_jax_are_put_back_also_after_an_error(
    tmp_path: Path, folder: str | None
) -> None:
    before = settings()

    def fail() -> None:
        with persistent_cache(tmp_path / folder if folder else None):
            assert (settings() != before) is bool(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert settings() == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = settings()
    folder = tmp_path / "file/x"
    with (
        pytest.raises(ArtifactError, match=f"{folder}: cannot be written"),
        persistent_cache(folder),
    ):
        raise AssertionError("the block ran")
    assert settings() == before


KERNEL = """
import importlib.util, os, sys
from pathlib import Path
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tpuport.core.programs.jax_cache import persistent_cache
from tpuport.core.mesh.slices import parse_topology, topology_devices

devices = np.array(topology_devices(parse_topology("v6e-8"))[:1])
whole = NamedSharding(Mesh(devices, ("tp",)), PartitionSpec())
root = Path(sys.argv[1])
for place in ("a", "deep/b"):
    source = root / place / "kernel.py"
    source.parent.mkdir(parents=True)
    source.write_text("def body(x, o):\\n    o[...] = x[...] * 2\\n")
    spec = importlib.util.spec_from_file_location("kernel", source)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=whole)
    call = pl.pallas_call(
        module.body, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype)
    )
    with persistent_cache(root / place / "cache"):
        jax.jit(lambda x: call(x)).lower(x).compile()
"""


@needs_libtpu
def test_a_kernel_has_the_same_name_wherever_its_source_lies(tmp_path: Path) -> None:
    """Pallas puts the paths of the source into a kernel, which is hashed as it is."""
    variables = compile_environment(parse_topology("v6e-8"))
    run_program(KERNEL, str(tmp_path), **variables)
    first, second = (names(tmp_path / place / "cache") for place in ("a", "deep/b"))
    assert len(first) == 1
    assert first == second
