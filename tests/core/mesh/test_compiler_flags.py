"""The compiler's flags per chip: the table, who wins, and that they reach a program."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import pytest
import torch

import tpuport
from tests.core.heard import Heard
from tests.processes import needs_libtpu, run_json
from tpuport.core.files.run_record import STAGES
from tpuport.core.mesh.chips import CHIPS
from tpuport.core.mesh.compiler_flags import FLAGS, GATHERS, choose_flags, flags_for
from tpuport.core.mesh.slices import compile_environment, parse_topology

CHIPS_WITH_FLAGS = sorted({chip for flag in FLAGS for chip in flag.chips})
VMEM = "xla_tpu_scoped_vmem_limit_kib"
ASYNC = "xla_tpu_enable_async_all_to_all"
SPARSE = "xla_tpu_enable_sparse_core_collective_offload_all_gather"


def device(kind: str, platform: str = "tpu") -> Any:
    return SimpleNamespace(platform=platform, device_kind=kind)


# --- the table


def test_every_row_says_for_what_chips_what_it_does_and_who_says_so() -> None:
    assert FLAGS
    for flag in FLAGS:
        assert re.fullmatch(r"xla_[a-z0-9_]+", flag.name)
        assert re.fullmatch(r"[A-Za-z0-9]+", flag.value)
        assert flag.chips
        assert set(flag.chips) <= set(CHIPS)
        assert flag.stages
        assert set(flag.stages) <= {*STAGES, GATHERS}
        # A figure, and how it was had.
        assert re.search(r"\d", flag.effect)
        assert re.search(r"\b(predicted|measured)\b", flag.effect)
        assert flag.source
    for chip in CHIPS_WITH_FLAGS:  # one value of each flag
        names = [flag.name for flag in choose_flags(chip).applied]
        assert len(names) == len(set(names))


# --- who wins


def test_a_stage_takes_its_own_rows_alone() -> None:
    # A larger limit makes convolutions compile for minutes; see docs/performance.md.
    assert choose_flags("v6e", [], "decode").options == {}
    assert set(choose_flags("v6e", [], "denoise").options) == {VMEM, ASYNC}
    assert set(choose_flags("v6e", [], "decode", GATHERS).options) == {SPARSE}
    assert choose_flags("v6e", [], "denoise", GATHERS) == choose_flags("v6e", [])


def test_without_the_users_flags_all_of_the_chip_apply() -> None:
    chosen = choose_flags("v6e", ["--xla_tpu_rwb_fusion=false"])
    assert chosen.applied == tuple(f for f in FLAGS if "v6e" in f.chips)
    assert set(chosen.options) == {VMEM, ASYNC, SPARSE}
    assert f"--{VMEM}={chosen.options[VMEM]}" in chosen.texts
    assert chosen.remarks() == []


@pytest.mark.parametrize(
    "given",
    [f"--{ASYNC}=false", f"--no{ASYNC}", f"--{ASYNC}", f"-{ASYNC}=true"],
)
def test_a_flag_of_the_user_wins_and_is_said_so(given: str) -> None:
    chosen = choose_flags("v6e", [given])
    assert ASYNC not in chosen.options
    assert VMEM in chosen.options
    assert [text for _, text in chosen.overridden] == [given]
    (remark,) = chosen.remarks()
    assert given in remark
    assert f"--{ASYNC}=true is left out" in remark


def test_the_users_flags_are_those_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--xla_dump_to=/tmp/x --{VMEM}=16384")
    chosen = flags_for(device("TPU v6 lite"))
    assert chosen.chip == "v6e"
    assert VMEM not in chosen.options
    assert ASYNC in chosen.options
    assert chosen.remarks()


def test_other_devices_have_none() -> None:
    others = device("cpu", "cpu"), device("H100", "gpu"), device("TPU v99")
    for other in (*others, jax.devices()[0]):
        chosen = flags_for(other)
        assert (chosen.chip, chosen.options, chosen.texts) == (None, {}, ())


def test_a_port_says_which_flag_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{VMEM}=16384")
    chosen = flags_for(device("TPU v6 lite"))
    monkeypatch.setattr("tpuport.core.seam.seam.flags_for", lambda device: chosen)
    heard = Heard()
    tpuport.port(torch.nn.Linear(1, 1), reporter=heard)
    (ours,) = (flag for flag in choose_flags("v6e").applied if flag.name == VMEM)
    assert heard.about("compiler flag") == [
        f"compiler flag --{VMEM}=16384 is yours; tpuport's own {ours.text} is left out"
    ]


# --- what the installed compiler does with them

PROGRAM = """
import json, os, sys
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from tpuport.core.compat import shard_map
from tpuport.core.mesh.compiler_flags import flags_for
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.slices import parse_topology, topology_devices

def lowered(topology):
    topology = parse_topology(topology)
    devices = topology_devices(topology)
    mesh = build_mesh(MeshSpec(sp=len(devices)), devices)
    whole = NamedSharding(mesh, P())

    def work(constants, inputs):
        def turn(x, factor):
            heads = jax.lax.all_to_all(x, "sp", 1, 0, tiled=True)
            rows = jax.lax.all_to_all(jnp.cos(heads), "sp", 0, 1, tiled=True)
            return rows @ factor, None
        def rounds(x, factors):
            return jax.lax.scan(turn, x, factors)[0]
        split = P("sp")
        run = shard_map(rounds, mesh=mesh, in_specs=(split, P()), out_specs=split)
        return run(inputs, constants)

    def array(*shape, spec):
        placed = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed)

    factors = array(2, 1024, 1024, spec=P())
    rows = array(len(devices) * 512, 1024, spec=P("sp"))
    def lower_for(stage):
        options = flags_for(devices[0], stage).options or None
        return jax.jit(work, compiler_options=options).lower(factors, rows)

    return devices[0], lower_for("denoise"), lower_for("decode")

found = {}
for name in sys.argv[1:]:
    device, *programs = lowered(name)
    started = [p.compile().as_text().count(" all-to-all-start(") for p in programs]
    found[name] = {
        "options": flags_for(device, "denoise", "gathers").options,
        "started": dict(zip(("denoise", "decode"), started)),
    }
try:
    programs[0].compile(compiler_options={"xla_tpu_no_such_flag": "true"})
except Exception as error:
    found["refused"] = str(error)
print(json.dumps(found))
"""


def compiled(*topologies: str, flags: str = "") -> Any:
    variables = compile_environment(parse_topology(topologies[0]))
    variables |= {"XLA_FLAGS": "", "LIBTPU_INIT_ARGS": flags}
    return run_json(PROGRAM, *topologies, **variables)


@needs_libtpu
def test_the_compiler_takes_every_flag_on_its_chips() -> None:
    slices = {chip: f"{chip}-8" for chip in CHIPS_WITH_FLAGS}
    found = compiled(*slices.values())
    for chip, name in slices.items():
        options = choose_flags(chip).options
        assert found[name]["options"] == options
        # What the flag is for: a transfer is started, and waited for later.
        started = {"denoise": int(ASYNC in options), "decode": 0}
        assert found[name]["started"] == started
    # An option that it does not know is an error, so those above are known.
    assert "xla_tpu_no_such_flag" in found["refused"]


@needs_libtpu
def test_a_flag_in_libtpu_init_args_is_left_alone() -> None:
    found = compiled("v6e-8", flags=f"--{ASYNC}=false")["v6e-8"]
    assert ASYNC not in found["options"]
    assert VMEM in found["options"]
    assert found["started"] == {"denoise": 0, "decode": 0}
