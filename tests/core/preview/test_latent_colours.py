"""A linear fit from latents to colours, made of the autoencoder itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

import tpuport
from tests.models.conftest import make_vae
from tpuport.core.preview import latent_colours
from tpuport.core.preview.decode_input import DecodeInput, NoPreviewError, _Operators
from tpuport.core.preview.latent_colours import LatentColours
from tpuport.core.seam.ported import seam_of

#: Of [0, 1]: 0.031 was measured, where the mean colour alone misses 0.082.
BOUND = 0.04


def decoding(module: torch.nn.Module, *size: int) -> DecodeInput:
    """A call of ``decode`` for latents of a size."""
    latents = torch.zeros(size)
    return DecodeInput(
        name="vae",
        module=module,
        args=(latents,),
        kwargs={},
        latents=latents,
        _operators=_Operators(),
    )


def trained_vae(side: int = 16) -> torch.nn.Module:
    """A small autoencoder that gives smooth pictures back."""
    torch.manual_seed(0)
    vae = diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    steps = torch.optim.Adam(vae.parameters(), 5e-3)
    for _ in range(150):
        colours = 2 * torch.rand(8, 3, 3, 3) - 1
        pictures = torch.nn.functional.interpolate(
            colours, (side, side), mode="bilinear", align_corners=True
        )
        found = vae.decode(vae.encode(pictures).latent_dist.mode()).sample
        loss = (found - pictures).square().mean()
        steps.zero_grad()
        loss.backward()
        steps.step()
    return vae.eval()


def test_colours_are_near_those_of_the_decoded_pixels() -> None:
    """Mean colours of latent pixels, of pictures that the fit has not seen."""
    vae, size = trained_vae(), (2, 4, 8, 8)
    colours = LatentColours.of(decoding(vae, *size))
    with torch.no_grad():
        generator = torch.Generator("cpu").manual_seed(7)
        pixels = torch.Size((2, 3, 16, 16))
        latents = latent_colours._encoded(vae, pixels, [*size], generator)
        decoded = vae.decode(latents).sample
    expected = latent_colours._means(decoded, [*size])
    found = colours.frames(latents).reshape(-1, 3) / 255
    missed = np.abs(found - expected).mean()
    without = np.abs(expected.mean(0) - expected).mean()
    assert missed < BOUND
    assert missed < without / 2


class Linear(torch.nn.Module):
    """Decodes each latent pixel to a block of one colour, ``times`` frames of them.

    The first frame of latents may stand for one frame, as of causal autoencoders.
    """

    def __init__(self, times: int, *, causal: bool, frames_first: bool = False) -> None:
        super().__init__()
        self.map = torch.nn.Conv3d(4, 3, 1)
        self.times, self.causal, self.frames_first = times, causal, frames_first

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        colours = self.map(latents).tanh()
        colours = colours.repeat_interleave(self.times, 2)
        if self.causal:
            colours = colours[:, :, self.times - 1 :]
        colours = colours.repeat_interleave(4, 3).repeat_interleave(4, 4)
        return colours.transpose(1, 2) if self.frames_first else colours


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize("how", ["causal", "even", "frames first"])
def test_each_frame_of_latents_has_the_colours_of_its_frames(
    times: int, how: str
) -> None:
    vae = Linear(times, causal=how == "causal", frames_first=how == "frames first")
    with torch.no_grad():
        vae.map.weight *= 0.2  # where tanh is a line
        vae.map.bias *= 0.2
        latents = torch.randn(1, 4, 3, 2, 5)
        expected = (vae.map(latents).tanh() / 2 + 0.5).movedim(1, -1)[0] * 255
    found = LatentColours.of(decoding(vae, 1, 4, 3, 2, 5)).frames(latents)
    assert found.shape == (3, 2, 5, 3)
    assert np.abs(found - expected.numpy()).max() < 4


def test_the_second_use_reads_the_fit(tmp_path: Path) -> None:
    """Of the same weights; a damaged file is made again."""
    vae = make_vae()
    fits = []
    fitted = latent_colours._fitted

    def noted(decode: Any) -> np.ndarray:
        fits.append(decode)
        return fitted(decode)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_colours, "_fitted", noted)
        first = LatentColours.of(decoding(vae, 1, 4, 3, 6, 9), tmp_path)
        again = LatentColours.of(decoding(vae, 1, 4, 5, 2, 2), tmp_path)
        assert len(fits) == 1
        assert np.array_equal(first.weights, again.weights)
        (file,) = tmp_path.iterdir()
        file.write_text(file.read_text().replace("0.", "1.", 1))
        LatentColours.of(decoding(vae, 1, 4, 3, 6, 9), tmp_path)
        assert len(fits) == 2
        next(vae.parameters()).data += 1
        LatentColours.of(decoding(vae, 1, 4, 3, 6, 9), tmp_path)
    assert len(fits) == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_a_ported_autoencoder_makes_no_program_for_the_fit() -> None:
    expected = LatentColours.of(decoding(make_vae(), 1, 4, 3, 2, 2)).weights
    with tpuport.ported(make_vae(), progress=False) as vae:
        found = LatentColours.of(decoding(vae, 1, 4, 3, 2, 2)).weights
        assert not seam_of(vae).entries
    assert np.array_equal(found, expected)


def test_what_decodes_no_pictures_is_refused() -> None:
    vae = make_vae(out_channels=1)
    with pytest.raises(NoPreviewError, match="are no pictures"):
        LatentColours.of(decoding(vae, 1, 4, 3, 2, 2))
    with pytest.raises(NoPreviewError, match="are no pictures"):
        LatentColours.of(decoding(vae, 1, 4, 3))
