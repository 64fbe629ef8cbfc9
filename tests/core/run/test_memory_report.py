"""Memory call by call: the backend's numbers, or the compiler's, and which of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tpuport.core.mesh.device_memory import plan_of
from tpuport.core.reports import CallMemory, memory_table
from tpuport.core.run.memory_report import memory_after

MIB = 2**20
SQUARE = 512 * 512 * 4


class Counted:
    """A device whose backend keeps count."""

    def __init__(self, number: int, in_use: int, peak: int | None) -> None:
        self.platform, self.id = "tpu", number
        self.stats = {"bytes_in_use": in_use}
        if peak is not None:
            self.stats["peak_bytes_in_use"] = peak

    def memory_stats(self) -> dict[str, int]:
        return self.stats


def product() -> Any:
    """``x`` [512, 512] becomes ``(x @ w) @ w`` in its own place."""
    x = jnp.ones((512, 512))
    lowered = jax.jit(lambda w, x: (x @ w) @ w, donate_argnums=1).lower(x, x)
    return lowered.compile()


def after(devices: Any, compiled: Any, call: int = 0) -> CallMemory:
    return memory_after(devices, compiled, "denoise", "step", call)


def test_what_the_backend_counts_is_told_as_it_is() -> None:
    devices = [Counted(0, 3 * MIB, 5 * MIB), Counted(1, 2 * MIB, 7 * MIB)]
    first = after(devices, product())
    devices[1].stats["bytes_in_use"] = 4 * MIB
    second = after(devices, product(), 1)
    assert first["source"] == second["source"] == "live"
    assert first["parts"] == {}
    assert first["devices"] == (
        {"device": "tpu:0", "in_use": 3 * MIB, "peak": 5 * MIB},
        {"device": "tpu:1", "in_use": 2 * MIB, "peak": 7 * MIB},
    )
    assert second["devices"][1]["in_use"] == 4 * MIB


def test_without_a_count_the_plan_of_the_program_stands_in() -> None:
    call = after(jax.devices()[:1], product(), 4)
    assert call["source"] == "planned"
    assert call["parts"]["arguments"] == 2 * SQUARE
    assert call["parts"]["outputs"] == call["parts"]["shared"] == SQUARE
    assert call["parts"]["temporaries"] >= SQUARE
    (device,) = call["devices"]
    assert device["device"] == "cpu:0"
    # The weights and the carry stay; between the products there is one more square.
    assert device["in_use"] == 2 * SQUARE + call["parts"]["code"]
    assert device["peak"] == device["in_use"] + call["parts"]["temporaries"]


def test_what_has_no_plan_is_unknown() -> None:
    call = after(jax.devices()[:1], lambda *args: None)
    assert (call["source"], call["devices"], call["parts"]) == ("unknown", (), {})
    assert plan_of(None) == {}
    assert memory_table([("denoise", "step", [call])])[1][-1] == "unknown"


def test_calls_that_are_alike_make_one_line_of_their_fullest_device() -> None:
    devices = [Counted(n, 2 * MIB, 3 * 2**30) for n in range(4)]
    calls = []
    for call in range(5):
        if call == 3:
            devices[2].stats["bytes_in_use"] = 9 * MIB
        calls.append(after(devices, product(), call))
    one = "tpu:2, fullest of 4"
    assert memory_table([("denoise", "step", calls)])[1:] == [
        ("denoise", "step 1-3", "step", "4 x tpu", "2.0 MiB", "3.00 GiB", "live"),
        ("denoise", "step 4-5", "step", one, "9.0 MiB", "3.00 GiB", "live"),
    ]
