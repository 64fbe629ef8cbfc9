"""Tiles of our splash kernel: which are legal, which are chosen, what is refused."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.kernels.attention.oracle import Case, inputs
from tpuport.kernels.attention.splash import splash_attention
from tpuport.kernels.attention.splash_blocks import (
    MOST_WRITTEN_OUT,
    VMEM_MIB,
    SplashBlocks,
    default_blocks,
    vmem_bytes,
    vmem_limit,
)
from tpuport.kernels.attention.splash_kernel import Plan


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"q": 100, "kv": 128, "kv_compute": 128}, "q=100 must be a positive"),
        ({"q": 128, "kv": 0, "kv_compute": 128}, "kv=0 must be a positive"),
        ({"q": 128, "kv": 384, "kv_compute": 256}, "kv=384 must be a multiple"),
        ({"q": 384, "kv": 256, "kv_compute": 256, "q_compute": 256}, "q=384 must"),
        ({"q": 128, "kv": 512, "kv_compute": 256, "kv_step": 384}, "kv=512 must"),
        ({"q": 128, "kv": 768, "kv_compute": 256, "kv_step": 384}, "kv_step=384"),
    ],
)
def test_blocks_are_validated(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplashBlocks(**sizes)


@pytest.mark.parametrize(("q", "q_compute"), [(3072, 256), (1280, 256), (640, 128)])
def test_inner_tiles_are_as_wide_as_the_block_allows(q: int, q_compute: int) -> None:
    assert SplashBlocks(q=q, kv=256, kv_compute=256).q_compute == q_compute


def test_a_round_of_the_loop_keeps_the_program_short() -> None:
    assert SplashBlocks(q=3072, kv=3072, kv_compute=256).kv_step == 1536
    assert SplashBlocks(q=1024, kv=2048, kv_compute=256).kv_step == 2048
    # A tile that is too large on its own is still one.
    wide = SplashBlocks(q=MOST_WRITTEN_OUT // 128, kv=512, kv_compute=256)
    assert wide.kv_step == 256


@pytest.mark.parametrize("chip", VMEM_MIB)
@pytest.mark.parametrize("head_dim", [48, 64, 128, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("length", [1, 127, 129, 1031, 17776, 39826, 113600])
def test_default_blocks_fit_and_waste_little(
    length: int, itemsize: int, head_dim: int, chip: str
) -> None:
    blocks = default_blocks(length, length, head_dim, chip=chip, itemsize=itemsize)
    assert vmem_bytes(blocks, head_dim, itemsize=itemsize) <= vmem_limit(chip)
    # Parts of 128 keys would leave half the matrix unit idle, which wastes more, where
    # there is room for others.
    part = blocks.kv_compute
    if chip != "v4":
        assert part in ((256, 384) if length > 128 and blocks.kv >= 256 else (128,))
    # Of small blocks of keys, of float32 or in little VMEM, parts may be left over.
    least = 128 if blocks.kv >= 1024 else part
    for block, each in ((blocks.q, blocks.q_compute), (blocks.kv, least)):
        waste = -(-length // block) * block - length
        assert waste < max(each * -(-length // block), length / 16 + 1)


@pytest.mark.parametrize("length", [39826, 113600])
def test_default_blocks_at_the_lengths_that_matter(length: int) -> None:
    blocks = default_blocks(length, length, 64)
    assert (blocks.q_compute, blocks.kv_compute) == (256, 256)
    # Padding less than 1 %, and rounds of nearly as many scores as are written out.
    for block in (blocks.q, blocks.kv):
        assert -(-length // block) * block <= 1.01 * length
    assert blocks.q * blocks.kv_step > 0.85 * MOST_WRITTEN_OUT


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("chunk", [14336, 28672, 20480, 39936])
def test_a_chunk_of_whole_blocks_is_not_padded(chunk: int, head_dim: int) -> None:
    blocks = default_blocks(chunk, chunk, head_dim)
    assert (blocks.q_compute, blocks.kv_compute) == (256, 256)
    assert chunk % blocks.q == chunk % blocks.kv == 0


@pytest.mark.parametrize("sizes", [(0, 1, 64), (1, 0, 64), (1, 1, 0)])
def test_default_blocks_need_positive_sizes(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        default_blocks(*sizes)


def test_an_unknown_chip_is_refused() -> None:
    with pytest.raises(ValueError, match=r"unknown chip 'v9'; known are v4, v5e"):
        default_blocks(1, 1, 64, chip="v9")


def test_the_device_is_never_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise AssertionError("the attached device was asked")

    for name in ("devices", "local_devices", "default_backend", "device_count"):
        monkeypatch.setattr(jax, name, fail)
    assert default_blocks(17776, 17776, 64).q >= 2048


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"platform": "cpu", "interpret": False}, "TPU only, not for 'cpu'"),
        ({"mask": jnp.ones((1, 1, 1, 7), bool)}, r"a bool mask of shape \[1, 1, 1, 7"),
        ({"mask": jnp.ones((1, 1, 5, 7))}, r"a float mask of shape \[1, 1, 5, 7\]"),
        (
            {"blocks": SplashBlocks(q=16384, kv=1 << 18, kv_compute=256)},
            r"bytes of VMEM at head dim 64; v6e has",
        ),
        ({"window": (-1, 2)}, r"0 or more keys to each side; got \(-1, 2\)"),
        ({"case": Case(q_len=5, kv_len=7, dtype="float16")}, "got float16"),
        ({"case": Case(q_len=5, kv_len=0)}, "empty"),
        ({"case": Case(q_len=5, kv_len=7, head_dim=257)}, "up to 256, got 257"),
    ],
)
def test_refused_calls(options: dict[str, Any], message: str) -> None:
    given = {"interpret": True, "case": Case(q_len=5, kv_len=7), **options}
    arrays, _ = inputs(given.pop("case"))
    with pytest.raises((NotImplementedError, ValueError), match=message):
        splash_attention(*map(jnp.asarray, arrays), **given)


@pytest.mark.parametrize(
    ("left", "right"), [(None, None), (0, 0), (300, None), (None, 0), (700, 200)]
)
def test_steps_visit_every_block_that_a_query_block_may_see(
    left: int | None, right: int | None
) -> None:
    blocks = SplashBlocks(q=256, kv=384, kv_compute=128)
    plan = Plan(
        blocks=blocks,
        groups=1,
        factor=1.0,
        left=left,
        right=right,
        has_lengths=False,
        kv_len=3000,
        q_blocks=6,
        kv_blocks=8,
    )
    q_ids, k_ids = np.arange(6 * 256), np.arange(8 * 384)
    distance = k_ids - q_ids[:, None]
    sees = np.ones(distance.shape, bool)
    if left is not None:
        sees &= distance >= -left
    if right is not None:
        sees &= distance <= right
    seen = sees.reshape(6, 256, 8, 384).any((1, 3))
    first, last = plan.first_blocks(), plan.last_blocks()
    for i in range(6):
        assert list(np.flatnonzero(seen[i])) == list(range(first[i], last[i] + 1))
    assert plan.steps == seen.sum(1).max()


def test_a_window_runs_fewer_steps() -> None:
    arrays, _ = inputs(Case(q_len=1024, kv_len=1024, batch=1, heads=1, kv_heads=1))
    blocks = SplashBlocks(q=128, kv=128, kv_compute=128)

    def grid(**options: Any) -> tuple[int, ...]:
        traced = jax.make_jaxpr(
            lambda *x: splash_attention(*x, blocks=blocks, interpret=True, **options)
        )(*arrays)
        (call,) = (e for e in traced.eqns if e.primitive.name == "pallas_call")
        return tuple(call.params["grid_mapping"].grid)

    assert grid() == (1, 1, 8, 8)
    assert grid(window=(64, 64)) == (1, 1, 8, 3)
    assert grid(window=(64, 64), is_causal=True) == (1, 1, 8, 2)


@pytest.mark.parametrize(
    ("keys", "kv", "compute"),
    # A part of 384 where one of 256 would waste more; 2278 against 1879 bundles for
    # 2^20 scores of 1,031 keys.
    [(1031, 1152, 384), (300, 384, 384), (1024, 1024, 256), (2300, 2304, 256)],
)
def test_parts_of_keys_fill_the_matrix_unit(keys: int, kv: int, compute: int) -> None:
    blocks = default_blocks(keys, keys, 64)
    assert (blocks.kv, blocks.kv_compute) == (kv, compute)
