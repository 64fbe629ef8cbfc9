"""What the host has, what a compiled program takes, and what the compiler refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tpuport.core.mesh.device_memory import host_memory, plan_of, refused_bytes


def test_the_host_has_what_the_machine_or_the_container_has(tmp_path: Path) -> None:
    meminfo, none = tmp_path / "meminfo", tmp_path / "none"
    meminfo.write_text("MemTotal: 4096 kB\nMemAvailable: 99 kB\n")
    assert host_memory(meminfo, tmp_path) == 4096 * 1024
    (tmp_path / "memory.max").write_text("2000000\n")
    assert host_memory(meminfo, tmp_path) == 2000000
    assert host_memory(none, tmp_path) == 2000000
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory(meminfo, tmp_path) == 4096 * 1024
    assert host_memory(none, none) is None


@pytest.mark.parametrize(
    ("text", "found"), [("3000000\n", 3000000), ("9223372036854771712\n", None)]
)
def test_the_limit_of_the_first_version_of_cgroups(
    text: str, found: int | None, tmp_path: Path
) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(text)
    assert host_memory(tmp_path / "none", tmp_path) == found


def test_bytes_of_a_compiled_program() -> None:
    def double(x: Any) -> Any:
        return 2 * x

    x = jax.ShapeDtypeStruct((1024,), jnp.float32)
    plain = plan_of(jax.jit(double).lower(x).compile())
    donated = plan_of(jax.jit(double, donate_argnums=0).lower(x).compile())
    assert (plain["arguments"], plain["outputs"], plain["shared"]) == (4096, 4096, 0)
    assert donated["shared"] == 4096
    assert plan_of(double) == {}


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (
            "RESOURCE_EXHAUSTED: Allocation (size=3) XLA:TPU compile permanent error. "
            "Ran out of memory in memory space hbm. Used 48.25G of 31.25G hbm. "
            "Exceeded hbm capacity by 17.00G.",
            int(48.25 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
            "for HLO temporaries (54.50G) exceeds available HBM (31.25G).",
            int(54.5 * 2**30),
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", None),
        ("INTERNAL: something else", None),
    ],
    ids=["allocation", "temporaries", "vmem", "other"],
)
def test_the_size_is_read_from_the_compilers_words(
    message: str, size: int | None
) -> None:
    assert refused_bytes(message) == size
