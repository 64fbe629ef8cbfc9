"""Executables as files: whole, of the right key, loaded as they were compiled."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tests.core.programs.test_program_key import KEY
from tpuport.core.programs import executable_files as executables
from tpuport.core.programs import program_key
from tpuport.core.programs.executable_files import (
    ExecutableStore,
    NotSerialisable,
    load,
    serialise,
)
from tpuport.errors import ArtifactError


def mesh_of(*devices: int) -> Mesh:
    found = np.array([jax.devices()[i] for i in devices], dtype=object)
    shape = (2, len(devices) // 2) if len(devices) > 1 else (1, 1)
    return Mesh(found.reshape(shape), ("dp", "tp"), axis_types=(AxisType.Auto,) * 2)


def step(weights: Any, carry: Any, constants: Any, inputs: Any) -> tuple[Any, Any]:
    latents = jnp.tanh(carry["latents"] @ weights["w"]) + inputs["t"]
    return {"latents": latents, "none": None}, (latents.sum(),)


def arguments(mesh: Mesh) -> tuple[Any, Any, Any, Any]:
    whole = NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec(None, "tp"))
    values = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    return (
        {"w": jax.device_put(values, split)},
        {"latents": jax.device_put(values, whole), "none": None},
        None,
        {"t": jax.device_put(np.float32(0.5), whole)},
    )


def compiled_on(mesh: Mesh) -> Any:
    lowered = jax.jit(
        step, donate_argnums=(1,), out_shardings=NamedSharding(mesh, PartitionSpec())
    ).lower(*arguments(mesh))
    return lowered.compile()


@pytest.fixture
def store(tmp_path: Path) -> ExecutableStore:
    return ExecutableStore(tmp_path / "made" / "when needed")


@pytest.fixture
def written(store: ExecutableStore) -> executables.Entry:
    payload = serialise(compiled_on(mesh_of(0)), "cpu")
    return store.write(KEY, payload, seconds=1.5)


@pytest.mark.parametrize(
    "devices", [(0,), (5,), (0, 1, 2, 3), (4, 5, 6, 7), tuple(range(8))], ids=str
)
def test_a_loaded_program_is_the_compiled_one(
    devices: tuple[int, ...], store: ExecutableStore
) -> None:
    mesh = mesh_of(*devices)
    compiled = compiled_on(mesh)
    expected = jax.device_get(compiled(*arguments(mesh)))
    entry = store.write(KEY, serialise(compiled, "cpu"), seconds=1.5)
    del compiled
    jax.clear_caches()
    args = arguments(mesh)
    again = load(entry, args, list(mesh.devices.flat))
    carry, output = again(*args)
    # Bit for bit, on the same devices, and the carry's memory is the new carry's.
    np.testing.assert_array_equal(carry["latents"], expected[0]["latents"])
    np.testing.assert_array_equal(output[0], expected[1][0])
    assert carry["none"] is None
    assert carry["latents"].sharding == NamedSharding(mesh, PartitionSpec())
    assert args[1]["latents"].is_deleted()
    assert not args[0]["w"].is_deleted()
    with pytest.raises(TypeError, match="differ"):
        again(args[0], carry, None, {"t": jnp.zeros(3)})


def test_an_entry_reads_back_as_it_was_written(
    store: ExecutableStore, written: executables.Entry
) -> None:
    found = store.find(KEY)
    assert found == written
    assert found is not None
    assert (found.key, found.seconds) == (KEY, 1.5)
    assert store.find(replace(KEY, chip="other")) is None
    assert list(store.folder.iterdir()) == [written.path]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"", "is not a zip file"),
        (lambda raw: b"{}", "is not a zip file"),
        (lambda raw: raw[:40], "is not a zip file"),
        (lambda raw: raw[:-1], "is not a zip file"),
        (lambda raw: raw.replace(b'"seconds":1', b'"seconds":2'), "Bad CRC-32"),
        (lambda raw: raw[: len(raw) // 2] + b"?" + raw[len(raw) // 2 + 1 :], "Bad CRC"),
    ],
    ids=["empty", "other", "header", "short", "field", "byte"],
)
def test_a_damaged_file_is_refused_by_name(
    damage: Any, message: str, store: ExecutableStore, written: executables.Entry
) -> None:
    written.path.write_bytes(damage(written.path.read_bytes()))

    def use() -> None:
        entry = store.find(KEY)
        assert entry is not None
        load(entry, arguments(mesh_of(0)), [jax.devices()[0]])

    with pytest.raises(ArtifactError, match=message) as caught:
        use()
    assert str(written.path) in str(caught.value)


def test_a_file_of_another_version_is_refused(
    store: ExecutableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = store.write(KEY, b"payload")
    monkeypatch.setattr(program_key, "KEY_VERSION", 9)
    with pytest.raises(ArtifactError, match=r"key version \d, not 9"):
        executables.read_entry(written.path)


def test_a_file_under_another_name_is_not_used(
    store: ExecutableStore, written: executables.Entry
) -> None:
    other = replace(KEY, chip="other")
    written.path.rename(store.path(other))
    with pytest.raises(ArtifactError, match="another program than its name says"):
        store.find(other)


def test_nothing_is_left_of_a_write_that_fails(
    store: ExecutableStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ArtifactError, match="no room is left on the disk"):
        store.write(KEY, b"payload")
    assert list(store.folder.iterdir()) == []


def test_what_would_end_the_process_that_loads_it_is_not_kept() -> None:
    x = np.eye(3, dtype=np.float32)
    lapack = jax.jit(jnp.linalg.inv).lower(x).compile()
    with pytest.raises(NotSerialisable, match="lapack_"):
        serialise(lapack, "cpu")
