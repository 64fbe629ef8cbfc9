"""The linear update and its coefficients against upstream's own ``step``."""

from __future__ import annotations

import math
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from tpuport.core.spec.variant import FrameRule
from tpuport.models.cogvideox import config, scheduler

CONFIGS: dict[str, dict[str, Any]] = {
    "v, zero SNR": {
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "snr_shift_scale": 1.0,
        "timestep_spacing": "trailing",
    },
    "v, shifted": {
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "snr_shift_scale": 3.0,
        "timestep_spacing": "linspace",
    },
    "epsilon": {"prediction_type": "epsilon"},
    "sample": {"prediction_type": "sample", "set_alpha_to_one": False},
}


def run_ours(made: scheduler.Schedule, x: Any, outputs: Any, noises: Any) -> Any:
    previous = torch.zeros_like(x)
    draws = iter(noises)
    for i, m in enumerate(outputs):
        a, b, c, d, e, f = (float(v) for v in made.coefficients[i])
        noise = torch.zeros_like(x)
        for _ in range(made.noise_draws[i]):
            noise = next(draws)
        x0 = a * x + b * m
        x = c * x + d * x0 + e * previous + f * noise
        previous = x0
    return x


def run_upstream(
    kind: str, cfg: dict[str, Any], steps: int, x: Any, outputs: Any
) -> Any:
    """As many of the last steps as there are outputs, as the pipelines do."""
    generator = torch.Generator().manual_seed(0)
    if kind == "ddim":
        upstream = diffusers.CogVideoXDDIMScheduler(**cfg)
        upstream.set_timesteps(steps)
        times = list(upstream.timesteps)[steps - len(outputs) :]
        for t, m in zip(times, outputs, strict=True):
            x = upstream.step(m, t, x, return_dict=False)[0]
        return x
    upstream = diffusers.CogVideoXDPMScheduler(**cfg)
    upstream.set_timesteps(steps)
    old = None
    times = list(upstream.timesteps)[steps - len(outputs) :]
    for i, (t, m) in enumerate(zip(times, outputs, strict=True)):
        back = times[i - 1] if i else None
        x, old = upstream.step(m, old, t, back, x, generator=generator)
    return x


@pytest.mark.parametrize("steps", [1, 2, 3, 10, 50])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["ddim", "dpm"])
def test_a_run_of_steps_is_upstreams(kind: str, name: str, steps: int) -> None:
    cfg = {**CONFIGS[name], "clip_sample": False}
    cls = {
        "ddim": diffusers.CogVideoXDDIMScheduler,
        "dpm": diffusers.CogVideoXDPMScheduler,
    }[kind]
    made = scheduler.make_schedule(cls(**cfg), steps)
    generator = torch.Generator().manual_seed(1)
    shape = (1, 2, 3, 4, 5)
    x = torch.randn(shape, generator=generator)
    outputs = [torch.randn(shape, generator=generator) for _ in range(steps)]
    noise = torch.Generator().manual_seed(0)
    noises = [torch.randn(shape, generator=noise) for _ in range(2 * steps)]
    theirs = run_upstream(kind, cfg, steps, x, outputs)
    ours = run_ours(made, x, outputs, noises)
    scale = max(1.0, float(theirs.abs().max()))
    assert float((ours - theirs).abs().max()) <= 1e-5 * scale
    upstream = cls(**cfg)
    upstream.set_timesteps(steps)
    assert made.timesteps.tolist() == upstream.timesteps.tolist()
    assert made.stochastic == (kind == "dpm")


@pytest.mark.parametrize(("steps", "run"), [(10, 8), (7, 3), (5, 1), (4, 4)])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["ddim", "dpm"])
def test_the_last_steps_of_a_schedule_are_upstreams(
    kind: str, name: str, steps: int, run: int
) -> None:
    cfg = {**CONFIGS[name], "clip_sample": False}
    cls = {
        "ddim": diffusers.CogVideoXDDIMScheduler,
        "dpm": diffusers.CogVideoXDPMScheduler,
    }[kind]
    made = scheduler.make_schedule(cls(**cfg), steps, run)
    generator = torch.Generator().manual_seed(1)
    shape = (1, 2, 3, 4, 5)
    x = torch.randn(shape, generator=generator)
    outputs = [torch.randn(shape, generator=generator) for _ in range(run)]
    noise = torch.Generator().manual_seed(0)
    noises = [torch.randn(shape, generator=noise) for _ in range(2 * run)]
    theirs = run_upstream(kind, cfg, steps, x, outputs)
    ours = run_ours(made, x, outputs, noises)
    scale = max(1.0, float(theirs.abs().max()))
    assert float((ours - theirs).abs().max()) <= 1e-5 * scale
    assert len(made.timesteps) == len(made.noise_draws) == run


def test_the_number_of_noise_draws_is_upstreams() -> None:
    made = scheduler.make_schedule(
        diffusers.CogVideoXDPMScheduler(**CONFIGS["v, zero SNR"]), 5
    )
    assert made.noise_draws == (1, 2, 2, 2, 1)


def test_dynamic_guidance_is_upstreams_formula() -> None:
    timesteps = np.array([999, 500, 100, 3], np.int32)
    scales = scheduler.guidance_scales(timesteps, 6.0, dynamic=True)
    for t, scale in zip(timesteps.tolist(), scales, strict=True):
        formula = 1 + 6.0 * ((1 - math.cos(math.pi * ((4 - t) / 4) ** 5.0)) / 2)
        assert scale == pytest.approx(formula, rel=1e-6)
    assert set(scheduler.guidance_scales(timesteps, 6.0, dynamic=False)) == {6.0}


def test_epsilon_at_zero_snr_is_refused() -> None:
    cfg = {**CONFIGS["v, zero SNR"], "prediction_type": "epsilon"}
    with pytest.raises(ValueError, match=r"epsilon.*signal"):
        scheduler.make_schedule(diffusers.CogVideoXDDIMScheduler(**cfg), 4)


def test_frame_rules_name_the_nearest_counts() -> None:
    rule = FrameRule(step=16, limit=161)
    assert rule.allows(81)
    assert not rule.allows(80)
    assert rule.nearest(80) == (65, 81)
    assert rule.nearest(500) == (161,)
    assert rule.nearest(-3) == (1, 17)
    assert not rule.allows(177)


def test_the_variants_have_upstreams_defaults() -> None:
    found = {
        v.name: (
            (v.num_frames, v.height, v.width, v.fps),
            (v.num_inference_steps, v.guidance_scale),
            (v.options["scheduler"], v.options["dynamic_cfg"]),
        )
        for v in config.VARIANTS
        if v.repo_id
    }
    assert found == {
        "2b": ((49, 480, 720, 8), (50, 6.0), ("ddim", False)),
        "5b": ((49, 480, 720, 8), (50, 6.0), ("dpm", True)),
        "5b-i2v": ((49, 480, 720, 8), (50, 6.0), ("dpm", True)),
        "1.5-5b": ((81, 768, 1360, 16), (50, 6.0), ("dpm", True)),
        "1.5-5b-i2v": ((81, 768, 1360, 16), (50, 6.0), ("dpm", True)),
    }
