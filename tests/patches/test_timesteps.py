"""Timestep embeddings are torch's in every bit of their frequencies."""

from __future__ import annotations

import functools

import jax
import pytest
import torch
from diffusers.models.embeddings import Timesteps, get_timestep_embedding

from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.tracing.patching import Patch, applied
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.patches.timesteps import TIMESTEP_EMBEDDING, timestep_embedding

TIMES = torch.tensor([37.0, 1000.0, 6000.0])


def error(patches: tuple[Patch, ...]) -> float:
    """Largest difference of a compiled embedding from torch's."""
    module = Timesteps(256, flip_sin_to_cos=True, downscale_freq_shift=0)
    ported = PortedModule(
        module, model_runtime(mesh=None, platform="cpu", patches=patches)
    )
    found = jax.jit(functools.partial(ported.apply, {}))(to_numpy(TIMES))
    return float((to_torch(found) - module(TIMES)).abs().max())


def test_a_compiler_rounds_the_frequencies() -> None:
    """What diffusers-timestep-embedding cures: a guidance of 6000 shows it."""
    assert error(TIMESTEP_EMBEDDING) <= 1e-6
    assert error(()) > 1e-4


@pytest.mark.parametrize("dim", [8, 9])
@pytest.mark.parametrize("flip", [False, True])
def test_it_is_upstreams_bit_for_bit(flip: bool, dim: int) -> None:
    times = torch.tensor([0.0, 0.5, 999.0])
    for options in ({}, {"downscale_freq_shift": 0, "scale": 1000, "max_period": 500}):
        ours = timestep_embedding(times, dim, flip_sin_to_cos=flip, **options)
        theirs = get_timestep_embedding(times, dim, flip_sin_to_cos=flip, **options)
        assert torch.equal(ours, theirs)


def test_the_original_is_back_afterwards() -> None:
    from diffusers.models import embeddings

    original = embeddings.get_timestep_embedding
    with applied(TIMESTEP_EMBEDDING):
        assert embeddings.get_timestep_embedding is timestep_embedding
    assert embeddings.get_timestep_embedding is original
