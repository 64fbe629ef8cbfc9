"""The flow-matching Euler sampler as arrays: one time step and one size per step.

    next = x + dt * velocity

Source: diffusers ``FlowMatchEulerDiscreteScheduler.step`` without stochastic sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpuport.core.arrays import Float32, HostArray
from tpuport.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class FlowSchedule:
    """Everything a denoising loop needs from the scheduler.

    Attributes:
        timesteps: what the model is given, descending, float32 of shape [N].
        next_timesteps: those of the following steps, then 0, float32 of shape [N].
        deltas: sigma of the next step minus sigma of this one, float32 of shape [N].
    """

    timesteps: Float32[HostArray, "n"]
    next_timesteps: Float32[HostArray, "n"]
    deltas: Float32[HostArray, "n"]


def make_flow_schedule(
    config: Mapping[str, Any], steps: int, shift: float
) -> FlowSchedule:
    """The schedule of ``steps`` steps, by a fresh upstream scheduler.

    Args:
        config: the checkpoint's scheduler config.
        steps: number of steps. The noise levels before the shift are evenly spaced from
            1 down to 0, without 0, as the video pipelines pass them.
        shift: shift of the noise levels, in place of the config's.

    Raises:
        UsageError: the config asks for noise in every step, or for dynamic shifting.
    """
    for name in ("stochastic_sampling", "use_dynamic_shifting"):
        if config.get(name):
            raise UsageError(f"the scheduler's config has {name}, which is not ported")
    scheduler = make_scheduler(config, shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
    timesteps = scheduler.timesteps.float().numpy()
    sigmas = scheduler.sigmas.float()
    return FlowSchedule(
        timesteps=timesteps,
        next_timesteps=np.append(timesteps[1:], np.float32(0)),
        deltas=(sigmas[1:] - sigmas[:-1]).numpy(),
    )


def make_scheduler(config: Mapping[str, Any], shift: float) -> Any:
    """A fresh upstream scheduler of a checkpoint's config with another shift."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler.from_config(dict(config), shift=shift)
