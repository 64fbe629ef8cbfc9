"""Both HunyuanVideo autoencoders against upstream, whole, and their patches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.models.hunyuanvideo.vae.vaes import (
    ATOL,
    Bound,
    assert_close,
    decode_tile,
    encode_mode,
    frozen_vae,
    latents,
    make_vae,
    patches_of,
    pixels,
    shared_run,
    upstream_decode,
    upstream_mode,
)
from tpuport.core.tracing.patching import Patch, applied, inspect_patches
from tpuport.models.hunyuanvideo import vae_patches
from tpuport.models.hunyuanvideo.vae_patches import VAE_13B, VAE_15

#: Configuration, videos, latent frames: a video, then two of another configuration.
CASES = [
    ("15", 1, 3),
    ("13b", 1, 3),
    ("15 wider", 2, 2),
    ("13b without attention", 2, 2),
    pytest.param("15", 2, 3, marks=pytest.mark.sweep),
    pytest.param("13b", 2, 3, marks=pytest.mark.sweep),
]
IMAGES = [("15", 1, 1), ("13b", 1, 1)]


@pytest.mark.parametrize(("name", "batch", "frames"), [*CASES, *IMAGES])
def test_decode_is_upstreams(name: str, batch: int, frames: int) -> None:
    vae = frozen_vae(name)
    z = latents(vae, batch, frames, 4, 3)
    found = shared_run(name)(decode_tile(name), z)
    assert_close(found, upstream_decode(vae, z))


# An image is encoded by the test of the mode.
@pytest.mark.parametrize(("name", "batch", "frames"), CASES)
def test_encode_is_upstreams(name: str, batch: int, frames: int) -> None:
    vae = frozen_vae(name)
    x = pixels(batch, 4 * frames - 3, 48, 32)
    found = shared_run(name)(encode_mode(name), x)
    assert_close(found, upstream_mode(vae, x))


@pytest.mark.parametrize("name", ["15", "13b"])
def test_decode_is_no_further_from_the_truth_than_upstream(name: str) -> None:
    vae = make_vae(name)
    z = latents(vae, 1, 3, 4, 3)
    found, upstream = shared_run(name)(decode_tile(name), z), vae.decode(z).sample
    truth = vae.double().decode(z.double()).sample
    error = float((found - truth).abs().max())
    assert error <= 2 * float((upstream - truth).abs().max())


@pytest.mark.parametrize("name", ["15", "13b"])
def test_bfloat16_weights_err_about_as_upstream_does(name: str) -> None:
    low = make_vae(name).to(torch.bfloat16)
    z = latents(low, 1, 3, 4, 3).to(torch.bfloat16)
    exact = make_vae(name).to(torch.bfloat16).float()
    truth = exact.decode(z.float()).sample
    found = Bound(low, patches_of(name))(decode_tile(name), z.float())
    # Tiles are fetched as they are, and blended as upstream blends them.
    assert found.dtype == torch.bfloat16
    error = float((found.float() - truth).abs().mean())
    upstream = low.decode(z).sample.float()
    assert error <= 1.1 * float((upstream - truth).abs().mean())


@pytest.mark.parametrize("name", ["15", "13b"])
def test_attention_goes_by_frames(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Three frames and not one, as some ports have it, and not full attention.
    vae, attend = frozen_vae(name), vae_patches.attend
    z = latents(vae, 1, 3, 4, 3)
    expected = vae.decode(z).sample

    def full(*args: Any, frame_tokens: int | None = None, **kwargs: Any) -> Any:
        return attend(*args, **kwargs)

    monkeypatch.setattr(vae_patches, "attend", full)
    found = Bound(vae, patches_of(name))(decode_tile(name), z)
    assert float((found - expected).abs().max()) > 100 * ATOL


def test_later_latents_do_not_reach_earlier_frames() -> None:
    run = shared_run("15")
    z = latents(frozen_vae("15"), 1, 3, 4, 3)
    changed = z.clone()
    changed[:, :, 2] += 1
    first, second = run(decode_tile("15"), z), run(decode_tile("15"), changed)
    assert torch.equal(first[:, :, :5], second[:, :, :5])
    assert not torch.equal(first[:, :, 5:], second[:, :, 5:])


def test_every_patch_applies_here_and_is_undone() -> None:
    from diffusers.models.autoencoders import autoencoder_kl_hunyuan_video as v13b
    from diffusers.models.autoencoders import autoencoder_kl_hunyuanvideo15 as v15

    patches = (*VAE_15, *VAE_13B)
    states = {s.name: s.state for s in inspect_patches(patches)}
    assert states == {
        "hunyuanvideo15-vae-frame-causal-attention": "applicable",
        "hunyuanvideo15-vae-convolution-in-chunks": "applicable",
        "hunyuanvideo15-vae-upsampling-in-chunks": "applicable",
        "hunyuanvideo-vae-frame-causal-attention": "applicable",
    }
    owners = (v15.HunyuanVideo15AttnBlock, v13b.HunyuanVideoMidBlock3D)
    before = [vars(owner)["forward"] for owner in owners]
    with applied(patches):
        for owner, original in zip(owners, before, strict=True):
            assert vars(owner)["forward"] is not original
    assert [vars(owner)["forward"] for owner in owners] == before


def test_upstreams_15_fails_on_two_videos_and_the_patch_does_not() -> None:
    vae = frozen_vae("15")
    z = latents(vae, 2, 2, 4, 3)
    with pytest.raises(RuntimeError, match="shape"):
        vae.decode(z)
    with applied(VAE_15):
        patched = vae.decode(z).sample
    assert_close(patched, upstream_decode(vae, z))


def operations(name: str, patches: Sequence[Patch], z: torch.Tensor) -> str:
    return Bound(frozen_vae(name), patches).lowered(decode_tile(name), z)


def test_15_takes_no_operation_for_each_token() -> None:
    vae = frozen_vae("15")
    small, large = (latents(vae, 1, 3, 4, columns) for columns in (3, 6))
    added = {}
    for label, patches in (("upstream", ()), ("ours", VAE_15)):
        texts = [operations("15", patches, z) for z in (small, large)]
        added[label] = len(texts[1].splitlines()) - len(texts[0].splitlines())
    # 36 tokens more.
    assert added["upstream"] >= 36
    assert added["ours"] <= 0


@pytest.mark.parametrize("name", ["15", "13b"])
def test_no_array_is_tokens_by_tokens(name: str) -> None:
    z = latents(frozen_vae(name), 1, 3, 4, 5)
    square = "60x60xf32"
    assert square in operations(name, (), z)
    assert square not in operations(name, patches_of(name), z)
