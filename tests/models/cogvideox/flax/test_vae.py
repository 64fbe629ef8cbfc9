"""CogVideoX's VAE in Flax: against diffusers, chunk by chunk, whole and split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX
from jax.sharding import Mesh, PartitionSpec

from tests.tolerances import TOLERANCES
from tpuport.core.mesh.spatial_split import (
    AXES,
    COLUMNS,
    ROWS,
    VIDEOS,
    Side,
    Space,
    padded,
)
from tpuport.models.cogvideox import conditioning, stages
from tpuport.models.cogvideox.flax_grid import Grid
from tpuport.models.cogvideox.flax_weights import FlaxWeights

CONFIG: dict[str, Any] = {
    "block_out_channels": [8, 16, 32],
    "down_block_types": ["CogVideoXDownBlock3D"] * 3,
    "up_block_types": ["CogVideoXUpBlock3D"] * 3,
    "norm_num_groups": 4,
    "layers_per_block": 1,
    "latent_channels": 4,
}
#: Rows and columns of pixels to one of latents.
STRIDE = 4
ONE = Grid()


@pytest.fixture(scope="module")
def upstream() -> AutoencoderKLCogVideoX:
    """In float64, where it is the truth: its own float32 is off by up to 1.4e-5."""
    torch.manual_seed(0)
    vae = AutoencoderKLCogVideoX(**CONFIG).eval().requires_grad_(False)
    for name, value in vae.named_parameters():
        if "norm" in name:
            value.add_(0.1 * torch.randn_like(value))
    return vae.double()


@pytest.fixture(scope="module")
def weights() -> FlaxWeights:
    return FlaxWeights(CONFIG)


@pytest.fixture(scope="module")
def arrays(
    upstream: AutoencoderKLCogVideoX, weights: FlaxWeights
) -> dict[str, jax.Array]:
    return converted(upstream, weights)


def converted(
    upstream: AutoencoderKLCogVideoX, weights: FlaxWeights
) -> dict[str, jax.Array]:
    stored = upstream.state_dict()
    weights.check(stored)
    found = (weights.convert(name, value) for name, value in stored.items())
    return {name: jnp.asarray(value.float().numpy()) for name, value in found}


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape, dtype=np.float32)


def in_chunks(
    run: Callable[..., Any], x: np.ndarray, lengths: list[int], dtype: Any = jnp.float32
) -> np.ndarray:
    """``run(chunk, cache)`` of [B, T, Y, X, C], joined along time."""
    assert sum(lengths) == x.shape[1]
    cache, outputs, start = None, [], 0
    for length in lengths:
        chunk = jnp.asarray(x[:, start : start + length], dtype)
        output, cache = run(chunk, cache)
        outputs.append(np.asarray(output, np.float32))
        start += length
    return np.concatenate(outputs, axis=1)


def decoder(weights: FlaxWeights, arrays: Any, grid: Grid) -> Callable[..., Any]:
    run = jax.jit(lambda a, z, cache: weights.bind(a).decode(z, cache, grid))
    return lambda z, cache: run(arrays, z, cache)


def encoder(weights: FlaxWeights, arrays: Any, grid: Grid) -> Callable[..., Any]:
    run = jax.jit(lambda a, x, cache: weights.bind(a).encode(x, cache, grid))
    return lambda x, cache: run(arrays, x, cache)


def first(x: np.ndarray) -> torch.Tensor:
    """Channels first, as upstream has it."""
    return torch.from_numpy(x).permute(0, 4, 1, 2, 3).double()


def last(x: torch.Tensor) -> np.ndarray:
    return x.float().permute(0, 2, 3, 4, 1).numpy()


def farthest(found: np.ndarray, truth: np.ndarray) -> float:
    assert found.shape == truth.shape
    return float(np.abs(found - truth).max())


# ------------------------------------------------------------- against diffusers


@pytest.mark.parametrize(
    "shape", [(1, 1, 3, 4, 4), (1, 4, 5, 3, 4), (2, 7, 3, 4, 4)], ids=str
)
def test_decoding_is_upstreams(
    shape: tuple[int, ...],
    upstream: AutoencoderKLCogVideoX,
    weights: FlaxWeights,
    arrays: Any,
) -> None:
    z = drawn(*shape)
    truth = last(upstream.decode(first(z)).sample)
    run = decoder(weights, arrays, ONE)
    found = in_chunks(run, z, stages.chunk_lengths(shape[1]))
    assert farthest(found, truth) <= TOLERANCES["component float32"]


@pytest.mark.parametrize(
    "shape", [(1, 1, 12, 16, 3), (1, 13, 12, 8, 3), (2, 25, 8, 12, 3)], ids=str
)
def test_encoding_is_upstreams(
    shape: tuple[int, ...],
    upstream: AutoencoderKLCogVideoX,
    weights: FlaxWeights,
    arrays: Any,
) -> None:
    x = drawn(*shape)
    truth = last(upstream.encode(first(x)).latent_dist.parameters)
    run = encoder(weights, arrays, ONE)
    found = in_chunks(run, x, conditioning.chunk_lengths(shape[1]))
    assert farthest(found, truth) <= TOLERANCES["component float32"]


def test_convolutions_of_the_moments_and_the_latents() -> None:
    """Upstream builds them for as many latent channels as pixels have."""
    config = {
        **CONFIG,
        "latent_channels": 3,
        "use_quant_conv": True,
        "use_post_quant_conv": True,
    }
    torch.manual_seed(2)
    upstream = AutoencoderKLCogVideoX(**config).eval().requires_grad_(False).double()
    weights = FlaxWeights(config)
    arrays = converted(upstream, weights)
    z, x = drawn(1, 2, 2, 3, 3), drawn(1, 1, 8, 8, 3)
    image, _ = decoder(weights, arrays, ONE)(jnp.asarray(z), None)
    moments, _ = encoder(weights, arrays, ONE)(jnp.asarray(x), None)
    limit = TOLERANCES["component float32"]
    truth = last(upstream.decode(first(z)).sample)
    assert farthest(np.asarray(image), truth) <= limit
    truth = last(upstream.encode(first(x)).latent_dist.parameters)
    assert farthest(np.asarray(moments), truth) <= limit


def test_bfloat16_is_no_worse_than_upstreams(
    upstream: AutoencoderKLCogVideoX, weights: FlaxWeights, arrays: Any
) -> None:
    z = drawn(1, 3, 6, 8, 4)
    rounded = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    # The truth is of the same rounded weights and latents, in float32.
    widened = {name: x.astype(jnp.float32) for name, x in rounded.items()}
    z = np.asarray(jnp.asarray(z, jnp.bfloat16), np.float32)
    truth = in_chunks(decoder(weights, widened, ONE), z, [3])
    ours = in_chunks(decoder(weights, rounded, ONE), z, [3], jnp.bfloat16)
    twin = AutoencoderKLCogVideoX(**CONFIG).eval().requires_grad_(False)
    twin.load_state_dict(upstream.state_dict())
    twin = twin.to(torch.bfloat16)
    theirs = last(twin.decode(first(z).to(torch.bfloat16)).sample)
    assert np.sqrt(np.mean((ours - truth) ** 2)) <= np.sqrt(
        np.mean((theirs - truth) ** 2)
    )


# ------------------------------------------------------------------ split in space


def split_run(
    weights: FlaxWeights,
    arrays: Any,
    method: str,
    parts: tuple[int, int, int],
    size: tuple[int, int],
    granule: int,
) -> Callable[..., Any]:
    """``run(chunk, cache)`` of whole pictures, over ``parts`` virtual devices."""
    mesh = Mesh(np.array(jax.devices()[: np.prod(parts)]).reshape(parts), AXES)
    space = Space(
        rows=Side(axis=ROWS, parts=parts[1], size=size[0]),
        columns=Side(axis=COLUMNS, parts=parts[2], size=size[1]),
    )
    grid = Grid(space=space)
    picture = PartitionSpec(VIDEOS, None, ROWS, COLUMNS, None)
    kept = PartitionSpec(VIDEOS, None, ROWS, COLUMNS, None)

    def local(a: Any, x: Any, cache: Any) -> Any:
        return getattr(weights.bind(a), method)(x, cache, grid)

    inner = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(PartitionSpec(), picture, kept),
            out_specs=(picture, kept),
            check_vma=False,
        )
    )
    scale = STRIDE if granule == 1 else 1

    def run(x: Any, cache: Any) -> Any:
        out, cache = inner(arrays, padded(space, "BTYXC", x), cache)
        return out[:, :, : size[0] * scale, : size[1] * scale], cache

    return run


#: Two videos, and neither side divides: phantom rows and columns.
UNEVEN = ((2, 2, 2), (5, 7))
SPLITS = [
    pytest.param((1, 2, 4), (4, 8), marks=pytest.mark.sweep),
    pytest.param((1, 2, 4), (5, 11), marks=pytest.mark.sweep),
    UNEVEN,
    # The last device has nothing but phantom columns, as some in ``test_sessions.py``.
    pytest.param((1, 1, 8), (3, 14), marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("parts", "size"), SPLITS, ids=str)
def test_decoding_over_devices_is_that_of_one(
    parts: tuple[int, int, int],
    size: tuple[int, int],
    weights: FlaxWeights,
    arrays: Any,
) -> None:
    z = drawn(parts[0], 5, *size, 4)
    truth = in_chunks(decoder(weights, arrays, ONE), z, [3, 2])
    run = split_run(weights, arrays, "decode", parts, size, 1)
    found = in_chunks(run, z, [3, 2])
    assert farthest(found, truth) <= TOLERANCES["mesh float32"]


@pytest.mark.parametrize(("parts", "size"), SPLITS[1:3], ids=str)
def test_encoding_over_devices_is_that_of_one(
    parts: tuple[int, int, int],
    size: tuple[int, int],
    weights: FlaxWeights,
    arrays: Any,
) -> None:
    x = drawn(parts[0], 17, size[0] * STRIDE, size[1] * STRIDE, 3)
    truth = in_chunks(encoder(weights, arrays, ONE), x, [9, 8])
    run = split_run(weights, arrays, "encode", parts, size, STRIDE)
    found = in_chunks(run, x, [9, 8])
    assert farthest(found, truth) <= TOLERANCES["mesh float32"]


# ------------------------------------------------------------------------- parts


def test_the_cache_is_of_the_causal_convolutions_and_nothing_else(
    weights: FlaxWeights, arrays: Any
) -> None:
    _, cache = decoder(weights, arrays, ONE)(jnp.zeros((1, 3, 2, 2, 4)), None)
    kernels = [
        name
        for name, weight in weights.by_name.items()
        if name.startswith("decoder.") and weight.shape[:-2] == (3, 3, 3)
    ]
    frames = jax.tree.leaves(cache)
    assert len(frames) == len(kernels) > 10
    assert {x.shape[:2] for x in frames} == {(1, 2)}


def test_statistics_of_a_large_mean() -> None:
    x = drawn(2, 3, 8, 12, 16) + 1000
    mean, variance = ONE.moments(jnp.asarray(x), 4)
    grouped = x.astype(np.float64).reshape(2, 3, 8, 12, 4, 4)
    truth = grouped.var(axis=(1, 2, 3, 5)).repeat(4, axis=1)
    centred = (x - np.asarray(mean)) / np.sqrt(np.asarray(variance))
    exact = grouped - grouped.mean(axis=(1, 2, 3, 5), keepdims=True)
    exact = exact.reshape(x.shape) / np.sqrt(truth)[:, None, None, None]
    assert np.abs(centred - exact).max() <= TOLERANCES["norm float32 large mean"]


def test_statistics_of_bfloat16_lose_less_than_its_rounding() -> None:
    wide = drawn(1, 3, 32, 32, 8) + 30
    x = jnp.asarray(wide, jnp.bfloat16)
    _, variance = ONE.moments(x, 2)

    def true(values: Any) -> np.ndarray:
        values = np.asarray(values, np.float64).reshape(3, 32, 32, 2, 4)
        return values.var(axis=(0, 1, 2, 4)).repeat(4)

    found = np.asarray(variance, np.float64)[0, 0, 0, 0]
    assert np.abs(found - true(x)).max() < np.abs(true(x) - true(wide)).min()
