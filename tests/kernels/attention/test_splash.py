"""Our splash kernel against float64, interpreted: what the kernel alone has.

What it shares with other implementations: ``test_exact.py``.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.attention.oracle import (
    Case,
    compiled,
    inputs,
    numpy_attention,
    worst,
)
from tests.sweeps import sweep, swept
from tests.tolerances import TOLERANCES
from tpuport.kernels.attention.attention import smooth_keys
from tpuport.kernels.attention.splash import (
    SplashBlocks,
    splash_attention,
    splash_feature_major,
)

# Small blocks, so that short inputs run over several of them, the last one partial.
BLOCKS = SplashBlocks(q=128, kv=256, kv_compute=128)
# Several rounds, parts of a round and tiles of queries.
MANY = SplashBlocks(q=256, kv=512, kv_compute=128, q_compute=128, kv_step=256)
TINY = SplashBlocks(q=128, kv=128, kv_compute=128)


def run(*arrays: Any, **options: Any) -> jax.Array:
    options = {"blocks": BLOCKS, **options}
    return compiled(splash_attention, *arrays, interpret=True, **options)


def run_feature_major(*arrays: np.ndarray, **options: Any) -> np.ndarray:
    """On arrays [B, H, D, L], given and returned as [B, H, L, D]."""
    turned = (x.swapaxes(2, 3) for x in arrays)
    options = {"blocks": BLOCKS, **options}
    got = compiled(splash_feature_major, *turned, interpret=True, **options)
    return np.asarray(got).swapaxes(2, 3)


@pytest.mark.parametrize("lengths", [None, (530, 70)])
def test_many_tiles_in_a_block(lengths: Any) -> None:
    arrays, options = inputs(Case(q_len=300, kv_len=1031, batch=2, lengths=lengths))
    want = numpy_attention(*arrays, **options)
    got = run(*arrays, **options, blocks=MANY)
    assert worst(got, want) < TOLERANCES["attention float32"]


def windowed(case: Case, left: int, right: int) -> tuple[list[np.ndarray], Any]:
    """The case's arrays, and its result if query i sees i - left .. i + right."""
    arrays, options = inputs(case)
    distance = np.arange(case.kv_len) - np.arange(case.q_len)[:, None]
    mask = (-left <= distance) & (distance <= right)
    return arrays, numpy_attention(*arrays, **options, mask=mask)


WINDOWED = [
    Case(q_len=400, kv_len=400, batch=1, heads=1, kv_heads=1),
    Case(q_len=200, kv_len=500, lengths=(0, 260), heads=1, kv_heads=1),
    # Queries far beyond the last key: some see none.
    Case(q_len=500, kv_len=130, batch=1, heads=2, kv_heads=1),
    Case(q_len=300, kv_len=300, is_causal=True, batch=1, heads=1, kv_heads=1),
]
#: The window ends with whole blocks.
WHOLE = Case(q_len=768, kv_len=512, batch=1, heads=1, kv_heads=1), (100, 600)


@pytest.mark.parametrize(
    ("case", "window"),
    sweep(
        [*zip(WINDOWED, ((5, 200), (200, 0), (200, 0), (5, 200)), strict=True), WHOLE],
        [*itertools.product(WINDOWED, ((5, 200), (200, 0))), WHOLE],
    ),
    ids=str,
)
def test_windows(case: Case, window: tuple[int, int]) -> None:
    arrays, want = windowed(case, *window)
    _, options = inputs(case)
    got = run(*arrays, **options, window=window, blocks=TINY)
    assert worst(got, want) < TOLERANCES["attention float32"]


@pytest.mark.parametrize(
    ("window", "lengths", "blocks"),
    sweep(
        [
            ((300, 390), None, TINY),
            ((300, 0), (300, 390), TINY),
            ((90, 90), None, MANY),
            ((300, 390), (300, 390), MANY),
        ],
        itertools.product(
            ((300, 390), (300, 0), (90, 90)), (None, (300, 390)), (TINY, MANY)
        ),
    ),
)
def test_a_key_that_a_query_does_not_see_is_nothing_to_it(
    window: tuple[int, int], lengths: Any, blocks: SplashBlocks
) -> None:
    # The first key stands in for padding, and its score is about 100 times the others',
    # or no number.
    case = Case(q_len=390, kv_len=390, heads=1, kv_heads=1, lengths=lengths)
    (q, k, v), options = inputs(case)
    q = np.abs(q) + 1
    distance = np.arange(390) - np.arange(390)[:, None]
    mask = (-window[0] <= distance) & (distance <= window[1])
    k[:, :, 0] = 0
    want = numpy_attention(q, k, v, **options, mask=mask)
    unseen = slice(window[0] + 1, None)
    for first in (40.0, np.nan):
        k[:, :, 0] = first
        got = run(q, k, v, **options, window=window, blocks=blocks)
        found, right = np.asarray(got)[:, :, unseen], want[:, :, unseen]
        assert worst(found, right) < TOLERANCES["attention float32"], first


CAUSAL: dict[str, Any] = {"is_causal": True}


@pytest.mark.parametrize(
    ("options", "kv_len", "blocks"),
    sweep(
        [
            (CAUSAL, 100, TINY),
            (CAUSAL, 600, MANY),
            ({"window": (200, 60)}, 256, TINY),
            ({"window": (150, 2000)}, 100, MANY),
            ({"window": (150, 2000)}, 600, TINY),
        ],
        itertools.product(
            (CAUSAL, {"window": (200, 60)}, {"window": (150, 2000)}),
            (100, 256, 600),
            (TINY, MANY),
        ),
    ),
)
def test_keys_after_the_last_one_add_nothing_in_a_window(
    options: dict[str, Any], kv_len: int, blocks: SplashBlocks
) -> None:
    # The array goes on for whole blocks of keys that do not count.
    (q, k, v), _ = inputs(Case(q_len=700, kv_len=1024, batch=1, heads=1, kv_heads=1))
    distance = np.arange(kv_len) - np.arange(700)[:, None]
    left, right = options.get("window", (700, 0))
    mask = (-left <= distance) & (distance <= right)
    got = run_feature_major(q, k, v, kv_len=kv_len, blocks=blocks, **options)
    want = numpy_attention(q, k[:, :, :kv_len], v[:, :, :kv_len], mask=mask)
    assert worst(got, want) < TOLERANCES["attention float32"]


def test_a_window_over_everything_is_none() -> None:
    arrays, _ = inputs(Case(q_len=129, kv_len=300))

    def program(**options: Any) -> str:
        def call(*arrays: jax.Array) -> jax.Array:
            return splash_attention(*arrays, interpret=True, blocks=BLOCKS, **options)

        return str(jax.make_jaxpr(call)(*arrays))

    assert program(window=(900, 900)) == program()
    assert program(window=(127, 900)) != program()


@pytest.mark.parametrize("blocks", [BLOCKS, MANY], ids=["one", "several"])
def test_keys_that_do_not_count_leave_no_trace(blocks: SplashBlocks) -> None:
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=600))
    for lengths in ((131, 513), (0, 300)):
        counted = np.asarray(lengths, np.int32)
        clean = run(q, k, v, kv_lengths=counted, blocks=blocks)
        dead = (np.arange(600) >= counted[:, None])[:, None, :, None]
        for junk in (1e6, np.inf, np.nan):
            keys, values = (np.where(dead, np.float32(junk), x) for x in (k, v))
            found = run(q, keys, values, kv_lengths=counted, blocks=blocks)
            np.testing.assert_array_equal(clean, found)


@pytest.mark.parametrize("length", [1, swept(127), 129, swept(513)])
def test_padding_changes_no_bit(length: int) -> None:
    # The same keys in a longer array and alone: both end inside a block. A padded key
    # with any weight at all, 2^-20 of the rest, would show in the last bits.
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=600))
    lengths = np.full((2,), length, np.int32)
    alone = run(q, k[:, :, :length], v[:, :, :length])
    np.testing.assert_array_equal(alone, run(q, k, v, kv_lengths=lengths))


@pytest.mark.parametrize(
    ("lengths", "window"),
    [
        (None, None),
        ((131, 513), (200, 60)),
        swept(None, (200, 60)),
        swept((131, 513), None),
    ],
)
def test_keys_that_do_not_count_raise_no_maximum(
    lengths: Any, window: tuple[int, int] | None
) -> None:
    # Scores of about -500 where keys count and of about 5000 where they do not: if the
    # maximum were of all, every weight would be 0. The caller has seen to the values.
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=600))
    q, k = np.abs(q) + 7, -np.abs(k) - 7
    counted = np.asarray(lengths or (500, 500), np.int32)
    counts = (np.arange(600) < counted[:, None])[:, None, :, None]
    k, v = np.where(counts, k, np.float32(70)), np.where(counts, v, np.float32(0))
    options: dict[str, Any] = {"kv_len": 500}
    if lengths:
        options = {"kv_lengths": counted}
    got = run_feature_major(q, k, v, hidden=True, window=window, **options)
    clean = np.where(counts, k, np.float32(0))
    want = run(q, clean, v, window=window, kv_lengths=counted)
    np.testing.assert_array_equal(got, want)
    assert float(np.abs(got).min(axis=2).max()) > 0


def test_keys_that_fill_no_block_at_all_do_not_count() -> None:
    # Two whole blocks of keys, of which only the first counts.
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=512))
    got = run_feature_major(q, k, v, kv_len=256)
    want = numpy_attention(q, k[:, :, :256], v[:, :, :256])
    assert worst(got, want) < TOLERANCES["attention float32"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_dominant_key_gives_its_value_exactly(dtype: str) -> None:
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=600, dtype=dtype))
    q, k = np.zeros_like(q), np.zeros_like(k)
    q[..., 0], k[..., 0], k[:, :, 70, 0] = 8, -20, 20
    want = np.broadcast_to(v[:, :, 70:71], q.shape)
    exact = 1e-6 if dtype == "float32" else 0
    got = run(q, k, v)
    assert worst(got, want) <= exact


def test_equal_scores_give_the_mean() -> None:
    # Weights that round alike above and below the line: nothing of it is left.
    (q, k, v), _ = inputs(Case(q_len=129, kv_len=600, dtype="bfloat16"))
    k = np.broadcast_to(k[:, :, :1], k.shape)
    mean = np.asarray(v, np.float64).mean(2, keepdims=True)
    want = np.broadcast_to(mean, q.shape).astype(jnp.bfloat16)
    got = run(q, k, v)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("lengths", [None, (0, 257)])
def test_k_smooth_leaves_the_softmax_and_brings_scores_back(lengths: Any) -> None:
    # Keys far from the origin, as some models have them: all scores are about 400,
    # and apart by a few only.
    (q, k, v), options = inputs(Case(q_len=129, kv_len=600, lengths=lengths))
    k = k + np.float32(50)
    if lengths:
        # What does not count is not part of the mean either.
        k[:, :, 257:] = 1e4
    want = numpy_attention(q, k, v, **options)
    counted = None if lengths is None else jnp.asarray(lengths)
    smooth = smooth_keys(jnp.asarray(k), counted)
    got = run(q, np.asarray(smooth), v, **options)
    assert worst(got, want) < TOLERANCES["attention float32 large scores"]
