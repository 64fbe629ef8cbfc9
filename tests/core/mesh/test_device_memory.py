"""What a device has for a program, and what a compiled one takes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tpuport.core.mesh import device_memory
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.device_memory import (
    host_memory,
    planned_bytes,
    program_room,
    refused_bytes,
)

GIB = 2**30


def device(platform: str, stats: Any = None, kind: str = "") -> Any:
    def memory_stats() -> Any:
        if stats is NotImplementedError:
            raise NotImplementedError("described only")
        return stats

    return SimpleNamespace(
        platform=platform, device_kind=kind, memory_stats=memory_stats
    )


def test_a_device_that_counts_tells() -> None:
    counted = device("tpu", {"bytes_limit": 30 * GIB, "bytes_in_use": 12 * GIB})
    assert program_room([counted], held=10 * GIB, own=2 * GIB) == 20 * GIB
    # The fullest of them decides, wherever it stands.
    full = device("tpu", {"bytes_limit": 30 * GIB, "bytes_in_use": 25 * GIB})
    assert program_room([counted, full, counted]) == 5 * GIB


def test_a_chip_that_is_described_is_looked_up() -> None:
    described = device("tpu", NotImplementedError, "TPU v6 lite")
    usable = chip("v6e").hbm_usable_bytes
    assert program_room([described] * 8, held=GIB) == usable - GIB
    assert program_room([device("gpu")]) is None


def test_cpu_devices_share_what_the_machine_has(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 99 kB\nMemAvailable:    4096 kB\n")
    assert host_memory(meminfo, tmp_path) == 4096 * 1024
    (tmp_path / "memory.max").write_text("2000000\n")
    (tmp_path / "memory.current").write_text("500000\n")
    assert host_memory(meminfo, tmp_path) == 1500000
    assert host_memory(meminfo, tmp_path, total=True) == 99 * 1024
    assert host_memory(tmp_path / "none", tmp_path, total=True) == 2000000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(meminfo, tmp_path) == 4096 * 1024
    assert host_memory(tmp_path / "none", tmp_path / "none") is None


def test_every_cpu_device_has_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_memory, "host_memory", lambda: 80 * GIB)
    assert program_room([device("cpu")] * 8, held=GIB) == 10 * GIB
    # Its own weights are there already, and so not in what is left.
    assert program_room([device("cpu")] * 8, own=2 * GIB) == 12 * GIB
    monkeypatch.setattr(device_memory, "host_memory", lambda: None)
    assert program_room([device("cpu")], own=GIB) is None


def test_page_cache_is_not_used_up(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("2000000\n")
    (tmp_path / "memory.current").write_text("1900000\n")
    (tmp_path / "memory.stat").write_text(
        "anon 500000\ninactive_anon 7\ninactive_file 1000000\nactive_file 400000\n"
    )
    assert host_memory(tmp_path / "none", tmp_path) == 1500000


def test_the_limit_of_the_first_version_of_cgroups(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    limit = tmp_path / "memory" / "memory.limit_in_bytes"
    limit.write_text("3000000\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("1000000\n")
    assert host_memory(tmp_path / "none", tmp_path) == 2000000
    stat = "inactive_file 5\ntotal_inactive_file 300000\ntotal_active_file 100000\n"
    (tmp_path / "memory" / "memory.stat").write_text(stat)
    assert host_memory(tmp_path / "none", tmp_path) == 2400000
    limit.write_text("9223372036854771712\n")
    assert host_memory(tmp_path / "none", tmp_path) is None


def test_bytes_of_a_compiled_program() -> None:
    import jax
    import jax.numpy as jnp

    def double(x: Any) -> Any:
        return 2 * x

    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    plain = planned_bytes(jax.jit(double).lower(x).compile())
    donated = planned_bytes(jax.jit(double, donate_argnums=0).lower(x).compile())
    assert plain is not None
    assert donated is not None
    assert plain - donated == 4096
    assert planned_bytes(double) is None
    assert refused_bytes("Ran out of memory in memory space hbm. Used 2.00G of 1G") == (
        2 * GIB
    )
