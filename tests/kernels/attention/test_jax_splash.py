"""What the wrapper of jax's splash refuses, and its blocks; results: test_exact.py."""

from __future__ import annotations

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
from tests.tolerances import TOLERANCES
from tpuport.kernels.attention import jax_splash
from tpuport.kernels.attention.jax_splash import (
    BlockSizes,
    default_blocks,
    jax_splash_attention,
)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"platform": "cpu", "interpret": False}, "TPU only, not for 'cpu'"),
        ({"mask": jnp.ones((1, 1, 1, 7), bool)}, r"a bool mask of shape \[1, 1, 1, 7"),
        ({"mask": jnp.ones((1, 1, 5, 7))}, r"a float mask of shape \[1, 1, 5, 7\]"),
    ],
)
def test_refusals(options: dict[str, Any], message: str) -> None:
    arrays, _ = inputs(Case(q_len=5, kv_len=7))
    with pytest.raises(NotImplementedError, match=message):
        jax_splash_attention(*arrays, **{"interpret": True, **options})


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (Case(q_len=5, kv_len=7, v_dim=32), "head dim 64 and value dim 32"),
        (Case(q_len=5, kv_len=7, dtype="float16"), "got float16"),
        (Case(q_len=5, kv_len=0), "empty"),
    ],
)
def test_refused_arrays(case: Case, message: str) -> None:
    arrays, _ = inputs(case)
    with pytest.raises(NotImplementedError, match=message):
        jax_splash_attention(*arrays, interpret=True)


@pytest.mark.parametrize("head_dim", [48, 64, 128, 256, 512, 1024])
@pytest.mark.parametrize("length", [1, 127, 129, 1031, 17776, 39826])
def test_default_blocks_are_valid_and_waste_little(length: int, head_dim: int) -> None:
    blocks = default_blocks(length, length, head_dim)
    for block, granule in ((blocks.q, 128), (blocks.kv, 256)):
        count = -(-length // block)
        assert count * block - length < count * granule
    assert blocks.q * head_dim <= 2048 * 128


@pytest.mark.parametrize("sizes", [(0, 1, 64), (1, 0, 64), (1, 1, 0)])
def test_default_blocks_need_positive_sizes(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        default_blocks(*sizes)


def test_default_blocks_never_ask_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise AssertionError("the attached device was asked")

    for name in ("devices", "local_devices", "default_backend", "device_count"):
        monkeypatch.setattr(jax, name, fail)
    assert default_blocks(17776, 17776, 64).q >= 2048


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"q": 100, "kv": 128, "kv_compute": 128}, "q=100 must be a positive"),
        ({"q": 128, "kv": 0, "kv_compute": 128}, "kv=0 must be a positive"),
        ({"q": 128, "kv": 384, "kv_compute": 256}, "kv=384 must be a multiple"),
    ],
)
def test_block_sizes_are_validated(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BlockSizes(**sizes)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_tile_of_the_mask_answers_any_and_all_like_the_tile(is_causal: bool) -> None:
    mask = jax_splash._TileMask(640, 384, is_causal)
    whole = np.ones(mask.shape, bool)
    whole = np.tril(whole) if is_causal else whole
    for row in range(0, 640, 128):
        for col in range(0, 384, 192):
            tile = slice(row, row + 128), slice(col, col + 192)
            assert mask[tile].any() == whole[tile].any()
            assert mask[tile].all() == whole[tile].all()


def test_aligned_lengths_are_not_widened() -> None:
    # Nothing to hide: the kernel gets the head dim as it is.
    arrays, _ = inputs(Case(q_len=128, kv_len=256, head_dim=128))
    text = str(
        jax.make_jaxpr(
            lambda *x: jax_splash_attention(
                *x, interpret=True, blocks=BlockSizes(q=128, kv=256, kv_compute=128)
            )
        )(*arrays)
    )
    assert "128,256]" not in text
    assert "256,256]" not in text


def test_kernel_blocks_beyond_the_diagonal_do_not_matter() -> None:
    # Lq > Lk over several blocks: rows past the last key see all keys, no padding.
    arrays, options = inputs(Case(q_len=500, kv_len=130, is_causal=True, batch=1))
    blocks = BlockSizes(q=128, kv=128, kv_compute=128)
    got = compiled(
        jax_splash_attention, *arrays, **options, blocks=blocks, interpret=True
    )
    assert (
        worst(got, numpy_attention(*arrays, **options))
        < (TOLERANCES["attention float32"])
    )
