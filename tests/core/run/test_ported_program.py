"""Bare modules whose methods return or draw distributions."""

from __future__ import annotations

import gc

import jax
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo15

import tpuport
from tests.tolerances import TOLERANCES
from tpuport.core.run.ported_program import PortedProgram
from tpuport.errors import UsageError

ATOL = TOLERANCES["component float32"]


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLHunyuanVideo15:
    torch.manual_seed(0)
    return AutoencoderKLHunyuanVideo15(
        block_out_channels=(16, 16, 32, 32, 32), layers_per_block=1, latent_channels=4
    ).eval()


@pytest.fixture(scope="module")
def program(vae: AutoencoderKLHunyuanVideo15) -> PortedProgram:
    return tpuport.port(vae, model="hunyuanvideo")


@torch.no_grad()
@pytest.mark.parametrize("return_dict", [True, False])
def test_encode_gives_upstreams_distribution(
    return_dict: bool, vae: AutoencoderKLHunyuanVideo15, program: PortedProgram
) -> None:
    x = torch.rand(1, 3, 5, 32, 32, generator=torch.Generator().manual_seed(0))
    ours, theirs = (m.encode(x, return_dict=return_dict) for m in (program, vae))
    found, expected = (out[0] for out in (ours, theirs))
    assert type(found) is type(expected)
    assert float((found.mode() - expected.mode()).abs().max()) <= ATOL
    drawn, wanted = (
        d.sample(torch.Generator().manual_seed(1)) for d in (found, expected)
    )
    assert float((drawn - wanted).abs().max()) <= ATOL


@pytest.mark.parametrize(
    "options",
    [{"sample_posterior": True}, {"generator": torch.Generator()}],
    ids=["posterior", "generator"],
)
def test_draws_within_a_program_are_refused(
    options: dict[str, object], program: PortedProgram
) -> None:
    with pytest.raises(UsageError, match="drawn once, when the program is traced"):
        program(torch.zeros(1, 3, 1, 32, 32), **options)


def test_unport_gives_the_module_and_the_memory_back(
    vae: AutoencoderKLHunyuanVideo15,
) -> None:
    def held() -> int:
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    with tpuport.ported(vae) as program:
        assert program.config is vae.config
        assert program.dtype == torch.float32
        before = held()
    assert before - held() >= program.plan.total_bytes
    for again in (lambda: tpuport.unport(program), lambda: program(torch.zeros(1))):
        with pytest.raises(UsageError, match="not ported any more"):
            again()


def test_a_setting_after_port_is_refused(
    vae: AutoencoderKLHunyuanVideo15, program: PortedProgram
) -> None:
    """A program that was traced before would not know of the setting."""
    before = vae.use_tiling
    with pytest.raises(UsageError, match=r"on the module before tpuport\.port"):
        program.enable_tiling()
    assert vae.use_tiling == before
