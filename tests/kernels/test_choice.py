"""What ``--attention`` takes, and that every option changes what runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.oracle import Case, inputs, worst
from tests.tolerances import TOLERANCES
from tpuport.errors import AttentionError, UsageError
from tpuport.kernels.attention import attention, smooth_keys
from tpuport.kernels.choice import AttentionChoice
from tpuport.kernels.problem import describe
from tpuport.kernels.selection import select

EVERY = AttentionChoice(
    name="splash",
    window=(3, 5),
    k_smooth=True,
    block_q=256,
    block_kv=512,
    block_kv_compute=128,
    running_max=True,
)
TEXT = (
    "splash:window=3,5;k_smooth=on;block_q=256;block_kv=512;block_kv_compute=128;"
    "running_max=on"
)


def test_text_and_choice_are_the_same_thing() -> None:
    assert AttentionChoice.parse(TEXT) == EVERY
    assert str(EVERY) == TEXT
    assert AttentionChoice.parse("auto") == AttentionChoice()
    assert str(AttentionChoice.parse("jax:k_smooth=off")) == "jax"
    assert AttentionChoice.parse("auto:window=7").window == (7, 7)
    assert EVERY.plain == AttentionChoice(name="splash")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("flash", "'flash'; known are: auto, splash, jax, reference, blockwise"),
        ("auto:", "attention option '' in 'auto:': options are window=LEFT,RIGHT"),
        ("auto:blocks=1", "option 'blocks=1'"),
        ("auto:window", "option 'window'"),
        ("auto:window=a,2", "window=a,2: expected LEFT,RIGHT"),
        ("auto:window=-1,2", "window=-1,2: give how many"),
        ("auto:k_smooth=yes", "k_smooth=yes: choose on or off"),
        ("splash:block_q=many", "block_q=many: expected a number"),
        ("splash:block_q=100", "block_q=100: must be a positive multiple of 128"),
        ("jax:block_kv=384;block_kv_compute=256", "block_kv=384: must be a multiple"),
        ("blockwise:block_q=0", "block_q=0: must be at least 1"),
        ("auto:window=1,1;window=2,2", "window appears twice"),
    ],
)
def test_what_is_not_a_choice_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AttentionChoice.parse(text)


# --- every option changes what runs

CASE = Case(q_len=384, kv_len=384, heads=2, kv_heads=2, head_dim=64)


def run(text: str, **changes: Any) -> tuple[jax.Array, str]:
    """The result of a choice and the program it is."""
    arrays, options = inputs(CASE)
    options |= changes

    def call(*arrays: jax.Array) -> jax.Array:
        return attention(
            *arrays, **options, platform="cpu", implementation=text, interpret=True
        )

    return call(*arrays), str(jax.make_jaxpr(call)(*arrays))


NAMES = ["splash", "jax", "reference", "blockwise"]
OPTIONS = {
    "window=40,60": ["splash", "reference", "blockwise"],
    "k_smooth=on": NAMES,
    "block_q=128": ["splash", "jax", "blockwise"],
    "block_kv=128": ["splash", "jax", "blockwise"],
    "block_kv=384;block_kv_compute=384": ["splash", "jax"],
    "running_max=on": ["splash"],
}
HONOURED = [(name, option) for option, names in OPTIONS.items() for name in names]
REFUSED = [(n, o) for o, names in OPTIONS.items() for n in NAMES if n not in names]


@pytest.mark.parametrize(("name", "option"), HONOURED)
def test_an_option_changes_the_program_and_only_a_window_the_result(
    name: str, option: str
) -> None:
    base = "block_kv_compute=128" if "block_kv_compute" in option else ""
    plain, program = run(f"{name}:block_kv=384;{base}" if base else name)
    found, changed = run(f"{name}:{option}")
    assert changed != program
    same = worst(found, np.asarray(plain)) < TOLERANCES["attention float32"]
    assert same == (not option.startswith("window"))


@pytest.mark.parametrize(("name", "option"), REFUSED)
def test_an_option_that_an_implementation_lacks_is_refused(
    name: str, option: str
) -> None:
    with pytest.raises(AttentionError, match=f"{name!r} cannot do this call"):
        run(f"{name}:{option}")


@pytest.mark.parametrize("name", ["splash", "reference", "blockwise"])
@pytest.mark.parametrize("window", [(0, 0), (40, 60), (0, 500), (500, 7)], ids=str)
def test_a_window_is_a_mask_of_neighbours(name: str, window: tuple[int, int]) -> None:
    ahead = np.arange(384)[None, :] - np.arange(384)[:, None]
    near = (ahead >= -window[0]) & (ahead <= window[1])
    want, _ = run("reference", mask=jnp.asarray(near)[None, None])
    found, _ = run(f"{name}:window={window[0]},{window[1]}")
    assert worst(found, np.asarray(want)) < TOLERANCES["attention float32"]


def problem(**changes: Any) -> Any:
    array = jax.ShapeDtypeStruct((1, 2, 2048, 64), jnp.bfloat16)
    return describe(array, array, array, **{"platform": "tpu", **changes})


def test_blocks_that_ran_are_told() -> None:
    chosen = select(problem(), "jax:block_q=512;block_kv=1024").blocks
    assert (chosen["block_q"], chosen["block_kv"]) == (512, 1024)
    assert 1024 % chosen["block_kv_compute"] == 0
    for name in ("jax", "splash"):
        inner = select(problem(), f"{name}:block_kv_compute=768").blocks
        assert inner["block_kv"] % 768 == 0
    assert select(problem(), "jax").blocks["block_q"] % 128 == 0
    assert select(problem(platform="cpu"), "blockwise:block_q=7").blocks["block_q"] == 7


def test_the_next_takes_over_where_one_refuses_and_says_so() -> None:
    array = jax.ShapeDtypeStruct((1, 1, 2048, 2048), jnp.bool_)
    masked = problem(mask=array)
    with pytest.raises(AttentionError, match="'splash' cannot do this call"):
        select(masked, "splash")
    found = select(masked, "splash", fall_back=True)
    assert found.implementation == "blockwise"
    assert [name for name, _ in found.passed_over] == ["splash", "jax", "reference"]
    # A kernel for another platform is a mistake, not a refusal of one call.
    with pytest.raises(AttentionError, match="TPU only"):
        select(problem(platform="cpu"), "jax", fall_back=True)


def test_smoothed_keys_have_the_mean_of_those_that_count_taken_off() -> None:
    k = jax.random.normal(jax.random.key(0), (2, 3, 5, 4)) + 7
    smooth = smooth_keys(k, jnp.asarray([2, 5]))
    np.testing.assert_allclose(smooth[0, :, :2].mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(smooth[1].mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(smooth_keys(k, None)[0].mean(axis=1), 0, atol=1e-5)
    assert np.isfinite(smooth_keys(k, jnp.asarray([0, 9]))).all()
