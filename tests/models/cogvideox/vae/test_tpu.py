"""CogVideoX's autoencoder of kernels, upstream's blocks and Flax's, beside upstream.

The kernels run in interpret mode, on CPU devices that stand in for TPUs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLCogVideoX

import tpuport
from tests.tolerances import TOLERANCES
from tpuport.core.layers.video_layers import KERNEL, PRODUCT
from tpuport.core.seam import target
from tpuport.core.seam.ported import seam_of
from tpuport.core.tracing.context import counted
from tpuport.core.tracing.runtime import Runtime

# Channels that the kernels take, and few of everything else.
CONFIG: dict[str, Any] = {
    "down_block_types": ("CogVideoXDownBlock3D",) * 2,
    "up_block_types": ("CogVideoXUpBlock3D",) * 2,
    "block_out_channels": (128, 256),
    "layers_per_block": 1,
    "latent_channels": 4,
    "temporal_compression_ratio": 2,
    "norm_num_groups": 32,
}
#: A decoder of no more blocks than there are kinds; no encoder is that small.
SMALL = {**CONFIG, "layers_per_block": 0}


@pytest.fixture(autouse=True)
def _as_on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_tpu(**settings: Any) -> Runtime:
        return Runtime(**{**settings, "platform": "tpu"})

    monkeypatch.setattr(target, "Runtime", as_tpu)


def vae_of(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoencoderKLCogVideoX(**config).eval().requires_grad_(False)


def told(ported: Any) -> dict[tuple[str, str], int]:
    """What the convolutions of all programs ran as, and why."""
    programs = [p for entry in seam_of(ported).entries.values() for p in entry.programs]
    found = counted(record for p in programs for record in p.convolutions)
    assert {record.call for record in found} == {"convolution"}
    return {(one.implementation, one.reason): one.count for one in found}


def check(part: str, name: str, config: dict[str, Any], chunks: list[Any]) -> Any:
    """Chunk by chunk, with what the chunk before handed on; returns the twin."""
    vae = vae_of(config)
    ported = tpuport.port(vae, mesh="sp=2", vae=name)
    ours = theirs = None
    for chunk in chunks:
        found, ours = getattr(ported, part)(chunk, conv_cache=ours)
        expected, theirs = getattr(vae, part)(chunk, conv_cache=theirs)
        assert found.shape == expected.shape
        apart = float((found - expected).abs().max())
        assert apart <= TOLERANCES["component float32"]
        assert float(expected.std()) > 0.1
    return ported


sweep = pytest.mark.sweep


@pytest.mark.parametrize("name", ["torchax", "flax"])
@pytest.mark.parametrize(
    ("rows", "columns", "lengths"),
    [(2, 5, (3,)), pytest.param(2, 16, (3, 2), marks=sweep)],
)
def test_a_decoder_of_kernels_is_upstreams(
    name: str, rows: int, columns: int, lengths: tuple[int, ...]
) -> None:
    """16 CPU seconds: every kernel of a decoder is compiled interpreted."""
    torch.manual_seed(1)
    chunks = [torch.randn(1, 4, frames, rows, columns) for frames in lengths]
    found = told(check("decoder", name, SMALL, chunks))
    # Nothing is left to the compiler.
    copied = (f"{KERNEL}, of a padded copy", "4 channels")
    assert found.keys() == {(KERNEL, ""), (PRODUCT, ""), copied}
    assert found[copied] == len(lengths)


@pytest.mark.parametrize("name", ["torchax", pytest.param("flax", marks=sweep)])
def test_an_encoder_of_kernels_is_upstreams(name: str) -> None:
    """13 CPU seconds: every kernel of an encoder is compiled interpreted."""
    torch.manual_seed(1)
    found = told(check("encoder", name, CONFIG, [torch.randn(1, 3, 3, 4, 10)]))
    left = {why for by, why in found if by == "XLA"}
    assert all("stride" in why for why in left)
    assert found[KERNEL, ""] > 0


def test_the_flax_vae_refuses_what_it_does_not_have() -> None:
    vae = vae_of({**SMALL, "act_fn": "gelu"})
    ported = tpuport.port(vae, vae="flax")
    with pytest.raises(tpuport.TpuportError, match="no other activation"):
        ported.decode(torch.randn(1, 4, 1, 4, 4))
