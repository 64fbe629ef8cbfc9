"""What the compiler says of a program that is too large."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.device_memory import refused_bytes
from tpuport.core.mesh.slices import parse_topology
from tpuport.core.plan.build_ahead import CompileError
from tpuport.core.plan.measure import measure


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


def test_what_does_not_compile_is_told_in_a_line() -> None:
    def compile() -> Any:
        raise RuntimeError("INTERNAL: no\nroom in vmem " + "text " * 400)

    kernels: Any = None
    program: Any = SimpleNamespace(
        stage="denoise",
        program_name="step",
        component="transformer",
        calls=1,
        resident=0,
        mesh=jax.make_mesh((1,), ("x",)),
        weights={},
        lowered=lambda: SimpleNamespace(compile=compile),
        traced=lambda: jax.jit(lambda: 1).trace(),
        attention=(),
        convolutions=(),
    )
    with pytest.raises(CompileError, match="denoise/step does not compile") as caught:
        measure(program, parse_topology("v6e-1"), chip("v6e"), kernels)
    assert "no room in vmem" in str(caught.value)
    assert len(str(caught.value)) < 500
