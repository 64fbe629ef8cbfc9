from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.attention.oracle import (
    Case,
    compiled,
    inputs,
    numpy_attention,
    worst,
)
from tests.tolerances import TOLERANCES
from tpuport.errors import AttentionError
from tpuport.kernels.attention.attention import attention
from tpuport.kernels.attention.choice import NAMES
from tpuport.kernels.attention.problem import Problem, describe
from tpuport.kernels.attention.selection import select


def problem(case: Case, platform: str, **changes: Any) -> Problem:
    def array(heads: int, length: int, dim: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((case.batch, heads, length, dim), case.dtype)

    return replace(
        describe(
            array(case.heads, case.q_len, case.head_dim),
            array(case.kv_heads, case.kv_len, case.head_dim),
            array(case.kv_heads, case.kv_len, case.v_dim or case.head_dim),
            platform=platform,
        ),
        **changes,
    )


SHORT, LONG = Case(q_len=512, kv_len=512), Case(q_len=513, kv_len=512)
WIDE = Case(q_len=513, kv_len=512, head_dim=257)
MASKED = {"mask_shape": (1, 1, 512, 512), "mask_is_bool": True}


@pytest.mark.parametrize(
    ("case", "platform", "changes", "want", "passed_over"),
    [
        (SHORT, "tpu", {}, "splash", []),
        (LONG, "tpu", {}, "splash", []),
        (SHORT, "tpu", MASKED, "reference", ["splash"]),
        (LONG, "tpu", MASKED, "blockwise", ["splash", "reference"]),
        (SHORT, "cpu", {}, "reference", ["splash"]),
        (LONG, "cpu", {}, "blockwise", ["splash", "reference"]),
        (WIDE, "tpu", {}, "blockwise", ["splash", "reference"]),
        (SHORT, "tpu", {"kv_len": (1 << 22) + 1}, "blockwise", ["splash", "reference"]),
        (LONG, "cpu", {"interpret": True}, "blockwise", ["splash", "reference"]),
        (LONG, "gpu", {}, "blockwise", ["splash", "reference"]),
    ],
)
def test_auto_takes_the_first_that_will_do(
    case: Case, platform: str, changes: Any, want: str, passed_over: list[str]
) -> None:
    selection = select(problem(case, platform, **changes))
    assert selection.implementation == want
    assert selection.reason
    assert [name for name, _ in selection.passed_over] == passed_over
    assert all(why for _, why in selection.passed_over)


def test_passing_over_says_why() -> None:
    (_, splash), (_, reference) = select(problem(LONG, "cpu")).passed_over
    assert splash == "it is for TPU; the platform is 'cpu'"
    assert reference.startswith("513 x 512 scores per head are more than")


def test_a_name_is_followed_where_auto_would_not() -> None:
    assert select(problem(LONG, "cpu"), "reference").implementation == "reference"
    assert select(problem(SHORT, "tpu"), "blockwise").implementation == "blockwise"
    named = select(problem(SHORT, "cpu", interpret=True), "splash")
    assert (named.implementation, named.reason) == ("splash", "asked for by name")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (MASKED, "takes no mask array, got a bool mask"),
        ({"v_dim": 300}, "head dims up to 256, got 300"),
        ({"dtype": "float16"}, "got float16"),
    ],
)
def test_a_name_that_cannot_do_it_is_passed_over(changes: Any, why: str) -> None:
    found = select(problem(SHORT, "tpu", **changes), "splash")
    assert found.implementation == "reference"
    ((name, said),) = found.passed_over
    assert name == "splash"
    assert why in said


def test_a_name_of_another_platform_is_an_error() -> None:
    with pytest.raises(AttentionError, match="TPU only, not for 'cpu'"):
        select(problem(SHORT, "cpu"), "splash")
    assert issubclass(AttentionError, NotImplementedError)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_reaches_the_implementation(name: str) -> None:
    case = Case(
        q_len=127, kv_len=150, heads=4, is_causal=True, lengths=(0, 99), scale=0.2
    )
    if name != "splash":
        case = replace(case, mask="float bhqk")
    arrays, options = inputs(case)
    got = compiled(
        attention,
        *arrays,
        **options,
        platform="cpu",
        implementation=name,
        interpret=True,
    )
    want = numpy_attention(*arrays, **options)
    assert worst(got, want) < TOLERANCES["attention float32"]


def test_the_call_runs_what_was_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for name in ("reference", "blockwise", "splash"):

        def record(q: Any, *args: Any, name: str = name, **options: Any) -> Any:
            ran.append(name)
            return q

        monkeypatch.setattr(
            f"tpuport.kernels.attention.attention.{name}_attention", record
        )
    small, large = jnp.ones((1, 1, 8, 8)), jnp.ones((1, 1, 600, 8))
    attention(small, small, small, platform="cpu")
    attention(large, large, large, platform="cpu")
    attention(large, large, large, platform="tpu")
    attention(large, large, large, platform="tpu", implementation="reference")
    assert ran == ["reference", "blockwise", "splash", "reference"]


def test_an_option_that_there_is_not_is_named() -> None:
    q: Any = jnp.ones((1, 1, 5, 8))
    misspelt: Any = {"is_casual": True}
    with pytest.raises(TypeError, match="attention has no option is_casual"):
        attention(q, q, q, platform="cpu", **misspelt)


def test_the_package_imports_no_torch_and_starts_no_device() -> None:
    program = (
        "import sys, tpuport.kernels.attention.attention\n"
        "from jax._src import xla_bridge\n"
        "assert 'torch' not in sys.modules\n"
        "assert not xla_bridge._backends\n"
    )
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=600)
    assert done.returncode == 0
