"""The autoencoder's main channels."""

from __future__ import annotations

import pytest
import torch

from training.demo import model, vae


def test_a_change_of_coordinates_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vae, "CHANNELS", model.WIDE)  # all of them
    torch.manual_seed(0)
    wide = model.new_vae(model.WIDE).eval()
    pixels = (
        torch.randn(4, 5, model.WIDE, 4, 4) * torch.linspace(0.1, 3, 16)[:, None, None]
    )
    found = vae.main_channels(wide, pixels - pixels.mean((0, 1, 3, 4), keepdim=True))
    video = torch.rand(1, 3, 5, 32, 32) * 2 - 1
    with torch.no_grad():
        before = wide.encode(video).latent_dist.mean
        after = found.encode(video).latent_dist.mean
        assert float((before - after).abs().max()) > 0.01
        expected, made = wide.decode(before).sample, found.decode(after).sample
    assert float((made - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


def test_main_channels_vary_alike() -> None:
    torch.manual_seed(0)
    wide = model.new_vae(model.WIDE).eval()
    with torch.no_grad():
        video = torch.rand(8, 3, 1, 64, 64) * 2 - 1
        latents = wide.encode(video).latent_dist.mean.transpose(1, 2)
        found = vae.main_channels(wide, latents).encode(video).latent_dist
    pixels = found.mean.transpose(0, 1).flatten(1)
    assert float(pixels.mean(1).abs().max()) < 1e-3
    assert float(pixels.square().mean()) == pytest.approx(1, rel=1e-2)
    covariance = torch.cov(pixels)
    apart = covariance - covariance.diag().diag()
    assert float(apart.abs().max()) < 1e-3
    assert float(found.std.mean()) < 0.06
