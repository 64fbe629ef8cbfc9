"""Upstream's VAE weights under the names and in the layouts of the Flax VAE."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLCogVideoX

from tpuport.errors import WeightsError
from tpuport.models.cogvideox.flax_weights import FlaxWeights
from tpuport.models.cogvideox.published import CONFIGS


@pytest.fixture(scope="module")
def weights() -> FlaxWeights:
    return FlaxWeights(CONFIGS["demo"]["vae"])


@pytest.mark.parametrize(
    "config",
    [
        CONFIGS["2b"]["vae"],
        CONFIGS["5b"]["vae"],
        CONFIGS["1.5-5b"]["vae"],
        CONFIGS["demo"]["vae"],
    ],
    ids=["2b", "5b", "1.5", "demo"],
)
def test_every_tensor_is_accounted_for(config: Any) -> None:
    with torch.device("meta"):
        stored = AutoencoderKLCogVideoX(**config).state_dict()
    weights = FlaxWeights(config)
    weights.check(stored)
    shapes = {w.stored: w.stored_shape for w in weights.by_name.values()}
    assert shapes == {name: tuple(value.shape) for name, value in stored.items()}


def test_shapes_are_known_without_a_single_array() -> None:
    before = {id(a) for a in jax.live_arrays()}
    shapes = {
        n: w.shape for n, w in FlaxWeights(CONFIGS["1.5-5b"]["vae"]).by_name.items()
    }
    assert [a for a in jax.live_arrays() if id(a) not in before] == []
    assert shapes["decoder.up_blocks.3.resnets.0.conv1.kernel"] == (3, 3, 3, 256, 128)
    assert shapes["decoder.up_blocks.0.upsamplers.0.kernel"] == (3, 3, 512, 512)
    assert shapes["encoder.norm_out.scale"] == (512,)


@pytest.mark.parametrize(
    ("stored", "name", "order"),
    [
        ("decoder.conv_in.conv.weight", "decoder.conv_in.kernel", (2, 3, 4, 1, 0)),
        (
            "encoder.down_blocks.0.downsamplers.0.conv.weight",
            "encoder.down_blocks.0.downsamplers.0.kernel",
            (2, 3, 1, 0),
        ),
        (
            "encoder.down_blocks.1.resnets.0.conv_shortcut.weight",
            "encoder.down_blocks.1.resnets.0.conv_shortcut.kernel",
            (2, 3, 4, 1, 0),
        ),
        (
            "decoder.norm_out.conv_y.conv.weight",
            "decoder.norm_out.conv_y.kernel",
            (2, 3, 4, 1, 0),
        ),
        (
            "decoder.norm_out.norm_layer.weight",
            "decoder.norm_out.norm_layer.scale",
            (0,),
        ),
        ("encoder.norm_out.bias", "encoder.norm_out.bias", (0,)),
    ],
)
def test_a_tensor_by_itself(
    stored: str, name: str, order: tuple[int, ...], weights: FlaxWeights
) -> None:
    shape = weights.by_stored_name[stored].stored_shape
    value = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    found, turned = weights.convert(stored, value)
    assert found == name
    np.testing.assert_array_equal(turned, value.transpose(order))
    _, torchs = weights.convert(stored, torch.from_numpy(value))
    np.testing.assert_array_equal(torchs.numpy(), turned)


def test_missing_and_unknown_tensors_are_refused_by_name(weights: FlaxWeights) -> None:
    names = set(weights.by_stored_name)
    with pytest.raises(WeightsError, match=r"1 missing: decoder\.conv_in\.conv\.bias"):
        weights.check(names - {"decoder.conv_in.conv.bias"})
    with pytest.raises(WeightsError, match=r"1 unknown: decoder\.extra"):
        weights.check(names | {"decoder.extra"})


def test_an_unknown_tensor_is_refused_by_itself(weights: FlaxWeights) -> None:
    with pytest.raises(WeightsError, match=r"'decoder\.extra', which the Flax VAE"):
        weights.convert("decoder.extra", np.zeros(3))
    with pytest.raises(WeightsError, match=r"no weight 'decoder\.extra'"):
        weights.bind({"decoder.extra": np.zeros(3)})


def test_a_tensor_of_another_shape_is_refused(weights: FlaxWeights) -> None:
    with pytest.raises(WeightsError, match=r"conv_in\.conv\.bias has the shape \(3,\)"):
        weights.convert("decoder.conv_in.conv.bias", np.zeros(3))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"act_fn": "gelu"}, "act_fn='gelu'"),
        ({"up_block_types": ["Other"] * 4}, "up_block_types="),
        ({"down_block_types": ["CogVideoXDownBlock3D"]}, "down_block_types="),
        ({"temporal_compression_ratio": 3}, "temporal_compression_ratio of 3"),
        ({"use_quant_conv": True}, "use_quant_conv"),
        ({"use_post_quant_conv": True}, "use_post_quant_conv"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else None,
)
def test_options_that_it_does_not_have_are_named(
    change: dict[str, Any], said: str
) -> None:
    with pytest.raises(NotImplementedError, match=said):
        FlaxWeights({**CONFIGS["demo"]["vae"], **change})
