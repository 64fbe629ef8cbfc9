"""Names of TPU slices, the chips they are of, and their devices without having any."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.processes import needs_libtpu
from tpuport.core.mesh.chips import CHIPS, chip, chip_of
from tpuport.core.mesh.slices import (
    TOPOLOGY_NAMES,
    TopologyError,
    compile_environment,
    parse_topology,
    topology_devices,
)
from tpuport.errors import UsageError
from tpuport.kernels.attention.splash_blocks import VMEM_MIB


@pytest.mark.parametrize(
    ("name", "libtpu", "chips", "devices"),
    [
        ("v6e-1", "v6e:1x1", 1, 1),
        ("v6e-8", "v6e:2x4", 8, 8),
        ("v6e-256", "v6e:16x16", 256, 256),
        ("v5e-4", "v5e:2x2", 4, 4),
        ("v5litepod-16", "v5e:4x4", 16, 16),
        ("v5p-8", "v5p:2x2x1", 4, 4),
        ("v5p-128", "v5p:4x4x4", 64, 64),
        ("v4-8", "v4:2x2x1", 4, 4),
        ("v7x-8", "tpu7x:2x2x1", 4, 8),
        ("TPU7x-16", "tpu7x:2x2x2", 8, 16),
    ],
)
def test_a_name_counts_chips_or_cores_as_google_does(
    name: str, libtpu: str, chips: int, devices: int
) -> None:
    found = parse_topology(name)
    assert (found.libtpu_name, found.chips, found.devices) == (libtpu, chips, devices)
    assert math.prod(found.dims) == chips


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("v6e-7", "v6e-4, v6e-8, v6e-16"),
        ("v5p-4", "counts TensorCores"),
        ("v6e8", "did you mean v6e-8"),
        ("v6-8", "did you mean v6e-8"),
        ("gpu-8", "there are v4-8 to "),
        ("h100-8", "v5e-1 to v5e-256, v5p-8 to "),
        ("", "there are "),
    ],
)
def test_an_unknown_name_is_answered_with_near_ones(name: str, said: str) -> None:
    with pytest.raises(UsageError, match="unknown TPU topology") as caught:
        parse_topology(name, others="cpu-8")
    # A size alone makes no name near.
    assert ("did you mean" in str(caught.value)) is said.startswith("did you mean")
    assert said in str(caught.value)
    assert str(caught.value).endswith(", or cpu-8")


@pytest.mark.parametrize(
    ("name", "rings"),
    [
        ("v6e-8", (False, False)),
        ("v6e-128", (False, True)),
        ("v5e-256", (True, True)),
        ("v5p-64", (False, False, False)),
        ("v5p-256", (True, True, True)),
    ],
)
def test_an_axis_is_a_ring_only_where_the_pod_closes_it(
    name: str, rings: tuple[bool, ...]
) -> None:
    assert parse_topology(name).rings == rings


def test_several_slices_are_as_many_chips_and_joined_by_their_share() -> None:
    two = parse_topology("v5p-128").times(2)
    assert (two.title, two.chips, two.devices) == ("2 x v5p-128", 128, 128)
    assert two.dims == parse_topology("v5p-128").dims
    assert parse_topology("v6e-8").times(1) == parse_topology("v6e-8")
    with pytest.raises(UsageError, match="bandwidth of the data-centre network of v4"):
        parse_topology("v4-8").times(2)
    # Gb/s of a chip, as Google gives them.
    given = {"v5e": 6.4e3 / 256, "v5p": 50, "v6e": 100, "v7x": 100}
    for name, gigabits in given.items():
        share, found = chip(name).dcn_bandwidth, chip(name)
        assert share == gigabits * 1e9 / 8 / found.devices_per_chip


def test_every_slice_is_of_a_chip_in_the_table() -> None:
    for name in TOPOLOGY_NAMES:
        found = parse_topology(name)
        constants = chip(found.chip)
        assert len(found.dims) == constants.ici_dims
        assert found.devices == found.chips * constants.devices_per_chip
    assert {parse_topology(name).chip for name in TOPOLOGY_NAMES} == set(CHIPS)


def test_a_chip_is_found_by_the_kind_of_a_device() -> None:
    kinds = [kind for found in CHIPS.values() for kind in found.device_kinds]
    assert len(set(kinds)) == len(kinds)
    assert chip_of(SimpleNamespace(device_kind="TPU v6 lite")) == "v6e"
    assert chip_of(SimpleNamespace(device_kind="TPU7x")) == "v7x"
    with pytest.raises(UsageError, match="'cpu' is not a TPU"):
        chip_of(SimpleNamespace(device_kind="cpu"))
    with pytest.raises(UsageError, match="unknown TPU chip 'v9'; known are: v4, v5e"):
        chip("v9")


@pytest.mark.parametrize("name", list(CHIPS))
def test_constants_agree_with_what_jax_knows_of_the_chip(name: str) -> None:
    """Sizes of a core are the same; rates as closely as the two sources are rounded."""
    from jax._src.pallas.mosaic import tpu_info

    ours = chip(name)
    # Kernels import nothing of core, so the splash kernel has a table of its own.
    assert ours.vmem_bytes == VMEM_MIB[name] << 20
    version = tpu_info.chip_version_from_device_kind(ours.device_kinds[0])
    assert version is not None
    core = tpu_info.get_tpu_info_for_chip(version, ours.cores)
    assert ours.vmem_bytes == core.vmem_capacity_bytes
    assert (ours.mxu_size, ours.mxus) == (core.mxu_column_size, core.num_mxus)
    assert ours.hbm_bytes == pytest.approx(core.hbm_capacity_bytes * ours.cores, 0.08)
    # jax has 2.46 TB/s for v5p where Google's page has 2.765.
    bandwidth = core.mem_bw_bytes_per_second * ours.cores
    assert ours.hbm_bandwidth == pytest.approx(bandwidth, 0.13)
    assert ours.peak_flops == pytest.approx(core.bf16_ops_per_second * ours.cores, 0.01)


def test_the_clock_follows_from_the_peak() -> None:
    found = {name: round(c.clock_hz / 1e9, 2) for name, c in CHIPS.items()}
    assert found == {"v4": 1.05, "v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "v7x": 2.2}
    assert chip("v6e").as_dict()["clock_hz"] == chip("v6e").clock_hz


def test_without_libtpu_one_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TopologyError, match="needs libtpu") as caught:
        topology_devices(parse_topology("v6e-8"))
    assert "\n" not in str(caught.value)


_DESCRIBE = """
import json, sys
from tpuport.core.mesh.chips import chip_of
from tpuport.core.mesh.slices import parse_topology, topology_devices
found = {}
for name in sys.argv[1].split(","):
    devices = topology_devices(parse_topology(name))
    hosts = len({d.process_index for d in devices})
    found[name] = [len(devices), chip_of(devices[0]), devices[0].num_cores, hosts]
print(json.dumps(found), flush=True)
if len(sys.argv) > 2:
    sys.stdin.readline()
"""


def _start(names: str, *more: str, **variables: str) -> subprocess.Popen[str]:
    kept = {k: v for k, v in os.environ.items() if k != "ALLOW_MULTIPLE_LIBTPU_LOAD"}
    path = os.pathsep.join(path for path in sys.path if path)
    return subprocess.Popen(
        [sys.executable, "-c", _DESCRIBE, names, *more],
        env=kept | {"PYTHONPATH": path} | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@needs_libtpu
def test_libtpu_knows_every_slice_and_two_processes_may_ask_at_once() -> None:
    variables = compile_environment(parse_topology("v6e-8"))
    first = _start("v6e-8", "wait", **variables)
    assert first.stdout is not None
    assert json.loads(first.stdout.readline())["v6e-8"] == [8, "v6e", 1, 1]
    try:
        out, err = _start(",".join(TOPOLOGY_NAMES), **variables).communicate(
            timeout=600
        )
    finally:
        first.communicate("\n", timeout=600)
    found: dict[str, list[Any]] = json.loads(out or "{}")
    assert found.keys() == set(TOPOLOGY_NAMES), err[-2000:]
    for name, (devices, kind, cores, _) in found.items():
        topology = parse_topology(name)
        assert (devices, kind) == (topology.devices, topology.chip)
        assert cores == chip(kind).cores
    # Eight chips of one machine are one process; more are four chips to each.
    assert {name: found[name][3] for name in ("v5e-8", "v6e-16", "v5p-16")} == {
        "v5e-8": 1,
        "v6e-16": 4,
        "v5p-16": 2,
    }


@needs_libtpu
def test_a_locked_libtpu_is_named_with_what_to_set() -> None:
    variables = compile_environment(parse_topology("v6e-8"))
    without = {k: v for k, v in variables.items() if not k.startswith("ALLOW")}
    first = _start("v6e-1", "wait", **without)
    assert first.stdout is not None
    line = first.stdout.readline()
    if not line:  # some other process on this machine has the lock: just what is asked
        _, err = first.communicate(timeout=600)
        assert "ALLOW_MULTIPLE_LIBTPU_LOAD=true" in err
        return
    try:
        second = _start("v6e-1", **without)
        _, err = second.communicate(timeout=600)
    finally:
        first.communicate("\n", timeout=600)
    assert second.returncode != 0
    assert "ALLOW_MULTIPLE_LIBTPU_LOAD=true" in err
