"""What ``--attention`` takes, and that every option changes what runs."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.attention.oracle import Case, inputs, numpy_attention, worst
from tests.tolerances import TOLERANCES
from tpuport.core.cost.attention_case import AttentionCase
from tpuport.core.cost.attention_cycles import with_blocks
from tpuport.errors import UsageError
from tpuport.kernels.attention import selection
from tpuport.kernels.attention.attention import attention, smooth_keys
from tpuport.kernels.attention.choice import AttentionChoice
from tpuport.kernels.attention.problem import Problem, describe
from tpuport.kernels.attention.selection import Selection

EVERY = AttentionChoice(
    name="splash",
    window=(3, 5),
    k_smooth=True,
    block_q=256,
    block_kv=512,
    block_kv_compute=128,
)
TEXT = "splash:window=3,5;k_smooth=on;block_q=256;block_kv=512;block_kv_compute=128"


def test_text_and_choice_are_the_same_thing() -> None:
    assert AttentionChoice.parse(TEXT) == EVERY
    assert str(EVERY) == TEXT
    assert AttentionChoice.parse("auto") == AttentionChoice()
    assert str(AttentionChoice.parse("splash:k_smooth=off")) == "splash"
    assert AttentionChoice.parse("auto:window=7").window == (7, 7)
    assert EVERY.plain == AttentionChoice(name="splash")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jax", "'jax'; known are: auto, splash, reference, blockwise"),
        ("auto:", "attention option '' in 'auto:': options are window=LEFT,RIGHT"),
        ("auto:blocks=1", "option 'blocks=1'"),
        ("auto:window", "option 'window'"),
        ("auto:window=a,2", "window=a,2: expected LEFT,RIGHT"),
        ("auto:window=-1,2", "window=-1,2: give how many"),
        ("auto:k_smooth=yes", "k_smooth=yes: choose on or off"),
        ("splash:block_q=many", "block_q=many: expected a number"),
        ("splash:block_q=100", "block_q=100: must be a positive multiple of 128"),
        (
            "splash:block_kv=384;block_kv_compute=256",
            "block_kv=384: must be a multiple",
        ),
        ("blockwise:block_q=0", "block_q=0: must be at least 1"),
        ("auto:window=1,1;window=2,2", "window appears twice"),
        (
            "reference:block_q=128",
            "attention reference has no block_q; blockwise and splash have",
        ),
        (
            "blockwise:block_kv_compute=128",
            "blockwise has no block_kv_compute; splash has",
        ),
    ],
)
def test_what_is_not_a_choice_is_named(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        AttentionChoice.parse(text)


# --- every option changes what runs

CASE = Case(q_len=384, kv_len=384, heads=2, kv_heads=2, head_dim=64)


def select(problem: Problem, text: str, **options: Any) -> Selection:
    """What runs for a choice in words."""
    return selection.select(problem, AttentionChoice.parse(text), **options)


@functools.cache
def traced(text: str) -> Any:
    arrays, options = inputs(CASE)

    def call(*arrays: jax.Array) -> jax.Array:
        return attention(
            *arrays,
            **options,
            platform="cpu",
            implementation=AttentionChoice.parse(text),
            interpret=True,
        )

    return jax.jit(call).trace(*arrays)


def program(text: str) -> str:
    """The program that a choice is."""
    return str(traced(text).jaxpr)


@functools.cache
def result(text: str) -> np.ndarray:
    """What the program of a choice gives."""
    arrays, _ = inputs(CASE)
    return np.asarray(traced(text).lower().compile()(*arrays))


NAMES = ["splash", "reference", "blockwise"]
OPTIONS = {
    "window=40,60": NAMES,
    "k_smooth=on": NAMES,
    "block_q=128": ["splash", "blockwise"],
    "block_kv=128": ["splash", "blockwise"],
    "block_kv=384;block_kv_compute=384": ["splash"],
}
HONOURED = [(name, option) for option, names in OPTIONS.items() for name in names]


@pytest.mark.parametrize(("name", "option"), HONOURED)
def test_an_option_changes_the_program_and_only_a_window_the_result(
    name: str, option: str
) -> None:
    base = "block_kv_compute=128" if "block_kv_compute" in option else ""
    plain, changed = f"{name}:block_kv=384;{base}" if base else name, f"{name}:{option}"
    assert program(changed) != program(plain)
    same = worst(result(changed), result(plain)) < TOLERANCES["attention float32"]
    assert same == (not option.startswith("window"))


@pytest.mark.parametrize("name", ["splash", "reference", "blockwise"])
@pytest.mark.parametrize(
    "window",
    [(0, 0), (40, 60), pytest.param((0, 500), marks=pytest.mark.sweep), (500, 7)],
    ids=str,
)
def test_a_window_is_a_mask_of_neighbours(name: str, window: tuple[int, int]) -> None:
    ahead = np.arange(384)[None, :] - np.arange(384)[:, None]
    near = (ahead >= -window[0]) & (ahead <= window[1])
    arrays, options = inputs(CASE)
    want = numpy_attention(*arrays, **options, mask=near)
    found = result(f"{name}:window={window[0]},{window[1]}")
    assert worst(found, want) < TOLERANCES["attention float32"]


def problem(**changes: Any) -> Any:
    array = jax.ShapeDtypeStruct((1, 2, 2048, 64), jnp.bfloat16)
    return describe(array, array, array, **{"platform": "tpu", **changes})


def test_blocks_that_ran_are_told() -> None:
    chosen = select(problem(), "splash:block_q=512;block_kv=1024").blocks
    assert (chosen["block_q"], chosen["block_kv"]) == (512, 1024)
    assert 1024 % chosen["block_kv_compute"] == 0
    inner = select(problem(), "splash:block_kv_compute=768").blocks
    assert inner["block_kv"] % 768 == 0
    assert select(problem(), "splash").blocks["block_q"] % 128 == 0
    assert select(problem(platform="cpu"), "blockwise:block_q=7").blocks["block_q"] == 7


def of_length(q_len: int, kv_len: int) -> Any:
    q, k = (jax.ShapeDtypeStruct((1, 2, n, 64), jnp.bfloat16) for n in (q_len, kv_len))
    return describe(q, k, k, platform="tpu")


@pytest.mark.parametrize(
    ("option", "lengths", "want"),
    [
        # 512s where these waste little, else a shorter one: 1024 and 1152.
        ("block_q=8192;block_kv=65536", (1000, 1000), (1024, 1024)),
        ("block_q=8192;block_kv=65536", (1031, 1000), (1152, 1024)),
        ("block_q=8192;block_kv=65536", (1, 129), (128, 256)),
        ("block_kv=65280;block_kv_compute=768", (1000, 1000), (None, 1536)),
        ("block_kv_compute=65536", (1000, 1000), (None, 1024)),
        ("block_kv=65536;block_kv_compute=32768", (1, 1), (None, 128)),
        # Those that the length has room for are taken as they are.
        ("block_q=640;block_kv=896", (1000, 1000), (640, 896)),
    ],
)
def test_no_block_is_longer_than_its_tokens(
    option: str, lengths: tuple[int, int], want: tuple[int | None, int]
) -> None:
    found = select(of_length(*lengths), f"splash:{option}").blocks
    assert want[0] in (None, found["block_q"])
    assert found["block_kv"] == want[1]
    assert found["block_kv"] % found["block_kv_compute"] == 0


def test_the_blocks_that_are_told_are_those_of_the_program() -> None:
    asked = "splash:block_q=8192;block_kv=65536;block_kv_compute=128"
    blocks = select(of_length(384, 384), asked).blocks
    assert (blocks["block_q"], blocks["block_kv"]) == (384, 384)
    text = ";".join(f"{option}={size}" for option, size in blocks.items())
    assert program(f"splash:{text}") == program(asked)
    assert "65536" not in program(asked)


LONG_PARTS = "splash:block_q=1024;block_kv=16384;block_kv_compute=16384"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LONG_PARTS, "scores take minutes to compile"),
        ("splash:block_q=2048;block_kv_compute=8192", "2048 queries by 8192 keys"),
        ("splash:block_kv=262144", "bytes of VMEM at head dim 64; v6e has"),
    ],
)
def test_blocks_that_no_compiler_gets_done_are_refused(text: str, message: str) -> None:
    long = of_length(400_000, 400_000)
    found = select(long, text)
    assert found.implementation == "splash"
    ((_, why),) = found.passed_over
    assert message in why
    assert found.blocks == select(long, "splash").blocks
    dropped = text.partition(":")[2].replace(";", ", ")
    assert found.notice == f"splash runs, without {dropped} ({why})"


@pytest.mark.parametrize("length", [1, 1000, 17776, 39826, 113600])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_kernels_own_blocks_are_never_refused(
    dtype: str, head_dim: int, length: int
) -> None:
    array = jax.ShapeDtypeStruct((1, 1, length, head_dim), dtype)
    asked = describe(array, array, array, platform="tpu")
    for chip in ("v4", "v5e", "v5p", "v6e", "v7x"):
        own = select(asked, "splash", chip=chip).blocks
        text = ";".join(f"{option}={size}" for option, size in own.items())
        assert select(asked, f"splash:{text}", chip=chip).blocks == own


def test_the_next_takes_over_where_one_refuses_and_says_so() -> None:
    array = jax.ShapeDtypeStruct((1, 1, 2048, 2048), jnp.bool_)
    masked = problem(mask=array)
    found = select(masked, "splash")
    assert found.implementation == "blockwise"
    assert [name for name, _ in found.passed_over] == ["splash", "reference"]
    why = found.passed_over[0][1]
    assert found.notice == f"splash passed over ({why}); blockwise runs"
    blocks = select(masked, "splash:block_q=128;block_kv=256")
    assert blocks.notice.startswith("splash passed over (")
    assert blocks.notice.endswith("; blockwise runs, without block_q=128, block_kv=256")


def test_smoothed_keys_have_the_mean_of_those_that_count_taken_off() -> None:
    k = jax.random.normal(jax.random.key(0), (2, 3, 5, 4)) + 7
    smooth = smooth_keys(k, jnp.asarray([2, 5]))
    np.testing.assert_allclose(smooth[0, :, :2].mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(smooth[1].mean(axis=1), 0, atol=1e-5)
    np.testing.assert_allclose(smooth_keys(k, None)[0].mean(axis=1), 0, atol=1e-5)
    assert np.isfinite(smooth_keys(k, jnp.asarray([0, 9]))).all()
    turned = smooth_keys(k.swapaxes(2, 3), jnp.asarray([2, 5]), axis=3)
    np.testing.assert_allclose(turned.swapaxes(2, 3), smooth, atol=1e-6)


@pytest.mark.parametrize("name", ["auto", "blockwise"])
def test_blocks_of_blockwise_are_those_of_the_program(name: str) -> None:
    x = jax.ShapeDtypeStruct((1, 1, 1024, 16), "float32")
    text = f"{name}:block_q=128;block_kv=256"
    told = select(describe(x, x, x, platform="cpu"), text)
    assert told.implementation == "blockwise"
    assert told.blocks == {"block_q": 128, "block_kv": 256}
    traced = jax.make_jaxpr(
        lambda q: attention(
            q, q, q, platform="cpu", implementation=AttentionChoice.parse(text)
        )
    )(jnp.zeros(x.shape))
    # Rounds of the loops over queries and over keys.
    assert {f"length={1024 // size}" for size in told.blocks.values()} <= set(
        re.findall(r"length=\d+", str(traced))
    )


def test_auto_goes_on_without_an_option_that_nobody_has() -> None:
    x = jax.ShapeDtypeStruct((1, 1, 1024, 16), "float32")
    problem = describe(x, x, x, platform="cpu")
    found = select(problem, "auto:block_kv_compute=128")
    assert found.implementation == "blockwise"
    assert "without options that it cannot take" in found.reason
    assert found.notice == "blockwise runs, without block_kv_compute=128"
    assert not select(problem, "auto:block_q=128").notice


@pytest.mark.parametrize("chip", ["v6e", "v5p"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [2048, 37000, 39826, 111664, 113600])
def test_tiles_that_are_measured_are_those_of_a_run(
    length: int, head_dim: int, chip: str
) -> None:
    """Of ``tpuport bench attention``, also where tiles of the table would pad more."""
    array = jax.ShapeDtypeStruct((1, 2, length, head_dim), jnp.bfloat16)
    run = select(
        describe(array, array, array, platform="tpu"), "splash", chip=chip
    ).blocks
    case = AttentionCase(
        implementation="tpuport",
        heads=2,
        q_len=length,
        kv_len=length,
        head_dim=head_dim,
        chip=chip,
    )
    found = with_blocks(case).blocks
    assert found is not None
    tiles = (found.q, found.kv, found.kv_compute)
    assert tiles == tuple(run[f"block_{n}"] for n in ("q", "kv", "kv_compute"))
