"""The key of a program: what is in it, and what a difference reads like."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core import compat
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.programs.jax_cache import lowered
from tpuport.core.programs.program_key import (
    KEY_VERSION,
    ProgramKey,
    host_name,
    module_key,
)

KEY = ProgramKey(
    model="Toy",
    component="transformer",
    program="forward",
    config={"layers": 2},
    weights={"a.weight": "float32[4, 4]", "b.weight": "float32[4] split ('tp',)"},
    arguments={"[0]": "float32[1, 13, 16]", "[1]": "float32[]"},
    structure="aa",
    platform="cpu",
    chip="cpu",
    compiler="XLA 1",
    mesh={"dp": 1, "tp": 1},
    devices=("0 of process 0",),
    host="a processor",
    versions={"jax": "0.10.2"},
    flags=("--xla_a=1",),
    settings={"jax_enable_x64": False},
)

#: A change of every field, and how the difference reads.
CHANGES: dict[str, tuple[Any, str]] = {
    "model": ("Other", "model Toy -> Other"),
    "program": ("decoder", "program forward -> decoder"),
    "component": ("vae", "component transformer -> vae"),
    "config": ({"layers": 3}, "transformer layers 2 -> 3"),
    "weights": (
        {**KEY.weights, "a.weight": "bfloat16[4, 4]"},
        "a.weight float32[4, 4] -> bfloat16[4, 4]",
    ),
    "arguments": (
        {**KEY.arguments, "[0]": "float32[1, 21, 16]"},
        "[0] float32[1, 13, 16] -> float32[1, 21, 16]",
    ),
    "structure": ("bb", "what is traced changed"),
    "platform": ("tpu", "platform cpu -> tpu"),
    "chip": ("TPU v6 lite", "chip cpu -> TPU v6 lite"),
    "compiler": ("XLA 2", "compiler XLA 1 -> XLA 2"),
    "mesh": ({"dp": 2, "tp": 1}, "mesh dp=1,tp=1 -> dp=2,tp=1"),
    "devices": (
        ("1 of process 0",),
        'devices ["0 of process 0"] -> ["1 of process 0"]',
    ),
    "host": ("another", "processor a processor -> another"),
    "versions": ({"jax": "0.11.0"}, "jax 0.10.2 -> 0.11.0"),
    "flags": (("--xla_b=1",), "compiler flag --xla_a=1 is not set now"),
    "settings": ({"jax_enable_x64": True}, "jax_enable_x64 false -> true"),
    "version": (0, f"key version {KEY_VERSION} -> 0"),
}


def test_every_field_has_its_change() -> None:
    assert {f.name for f in fields(ProgramKey)} == {*CHANGES}


@pytest.mark.parametrize("name", CHANGES)
def test_each_field_is_part_of_the_identity_and_has_its_words(name: str) -> None:
    value, words = CHANGES[name]
    changed = replace(KEY, **{name: value})
    assert changed.digest != KEY.digest
    assert words in changed.difference(KEY)
    assert KEY.difference(KEY) == ()


def test_many_arrays_are_counted() -> None:
    weights = {f"w{i}": "float32[2]" for i in range(40)}
    before = replace(KEY, weights=weights)
    after = replace(KEY, weights=dict.fromkeys(weights, "bfloat16[2]"))
    found = after.difference(before)
    assert found[0] == "w0 float32[2] -> bfloat16[2]"
    assert found[-1] == "37 more weights"
    assert len(found) == 4


def test_it_goes_through_json() -> None:
    read = ProgramKey.from_dict(json.loads(json.dumps(KEY.as_dict())), "x")
    assert read == KEY
    assert read.digest == KEY.digest
    with pytest.raises(ValueError, match="key version 0"):
        ProgramKey.from_dict({**KEY.as_dict(), "version": 0}, "x")


def key_of(factor: float, mesh: str = "dp=2,tp=4", *, placed: bool = False) -> Any:
    """The key of ``factor * w @ x``, whose weights are described or on the devices."""
    devices = build_mesh(MeshSpec.parse(mesh))
    split = NamedSharding(devices, PartitionSpec("tp"))
    w = jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=split)
    weights = {"weight": jax.device_put(jnp.zeros((8, 8)), split) if placed else w}
    traced = jax.jit(lambda w, x: factor * w["weight"] @ x).trace(
        {"weight": w}, jax.ShapeDtypeStruct((8, 2), jnp.float32)
    )
    module = torch.nn.Linear(8, 8)
    program = lowered(traced)
    return module_key("vae.decoder", module, devices, weights, program, ["decode"])


def test_the_key_of_a_program() -> None:
    key = key_of(2.0)
    assert (key.model, key.component, key.program) == ("Linear", "vae", "decoder")
    # The weights on the devices and those that are only described are one program's.
    assert key_of(2.0, placed=True) == key
    assert key.mesh == {"dp": 2, "sp": 1, "tp": 4}
    assert len(key.devices) == 8
    assert key.weights["weight"].endswith("split ('tp',)")
    assert key.arguments == {"[0]": "float32[8,2]"}
    assert {"python", "jax", "jaxlib", "torch", "torchax"} <= set(key.versions)
    assert key.host == host_name()
    assert key_of(3.0).difference(key) == ("what is traced changed",)
    assert "mesh dp=2,sp=1,tp=4 -> dp=1,sp=1,tp=4" in key_of(2.0, "tp=4").difference(
        key
    )


def test_compiler_flags_are_told_without_the_ones_that_only_dump(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(
        "XLA_FLAGS",
        "--xla_dump_to=/tmp/x --xla_force_host_platform_device_count=8 --xla_b=2",
    )
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a=1")
    assert compat.compiler_flags() == ("--xla_a=1", "--xla_b=2")
