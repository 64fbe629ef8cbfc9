"""What is told of a program that does not compile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import pytest

from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.slices import parse_topology
from tpuport.core.plan.building import CompileError
from tpuport.core.plan.measure import measure


def test_what_does_not_compile_is_told_in_a_line() -> None:
    def compile() -> Any:
        raise RuntimeError("INTERNAL: no\nroom in vmem " + "text " * 400)

    kernels: Any = None
    program: Any = SimpleNamespace(
        stage="denoise",
        name="step",
        component="transformer",
        calls=1,
        resident=0,
        mesh=jax.make_mesh((1,), ("x",)),
        weights={},
        lowered=lambda: SimpleNamespace(compile=compile),
        traced=jax.jit(lambda: 1).trace(),
        attention=(),
        convolutions=(),
    )
    with pytest.raises(CompileError, match="denoise/step does not compile") as caught:
        measure(program, parse_topology("v6e-1"), chip("v6e"), kernels)
    assert "no room in vmem" in str(caught.value)
    assert len(str(caught.value)) < 500
