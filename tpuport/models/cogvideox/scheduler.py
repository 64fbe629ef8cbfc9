"""The samplers of CogVideoX as one linear update with coefficients from upstream.

A step of DDIM and of the second-order DPM solver is linear in the sample x, the model
output m, the previous prediction and the noise:

    x0   = a * x + b * m
    next = c * x + d * x0 + e * previous_x0 + f * noise

Upstream's own step in float64 on unit vectors tells the six coefficients, and the
compiled step takes them as inputs. Sources: diffusers ``CogVideoXDDIMScheduler.step``
and ``CogVideoXDPMScheduler.step`` (formulas 12 and 16 of the DDIM paper, arXiv
2010.02502; DPM-Solver++, arXiv 2211.01095).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tpuport.core.spec.request import Request, denoising_steps
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.configs import building
from tpuport.errors import UsageError, damaged

_SCHEDULERS = {"CogVideoXDDIMScheduler": "ddim", "CogVideoXDPMScheduler": "dpm"}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything a denoising loop needs from the scheduler.

    Attributes:
        timesteps: of the model, descending, int32 of shape [N].
        coefficients: a, b, c, d, e, f of each step, float32 of shape [N, 6].
        noise_draws: how many times upstream draws noise in each step; the last draw is
            the one that counts.
        initial_scale: of the initial noise.
    """

    timesteps: np.ndarray
    coefficients: np.ndarray
    noise_draws: tuple[int, ...]
    initial_scale: float

    @property
    def stochastic(self) -> bool:
        """Whether steps take noise."""
        return any(self.noise_draws)


def make_scheduler(checkpoint: Checkpoint, kind: str) -> Any:
    """A fresh upstream scheduler.

    Args:
        checkpoint: whose ``scheduler/scheduler_config.json`` is used.
        kind: ``"checkpoint"`` for the class it names, or ``"ddim"`` or ``"dpm"``. When
            that is another class than the checkpoint's, it is made as upstream's
            command-line script makes it: from the config, with trailing timesteps.
    """
    import diffusers

    checkpoint.upstream_class("scheduler")
    config = checkpoint.config("scheduler")
    named = checkpoint.class_name("scheduler") or ""
    own = _SCHEDULERS.get(named)
    if kind == "checkpoint" and own is None:
        raise UsageError(
            f"{checkpoint.source}: scheduler {named or None} is not one of "
            f"{', '.join(_SCHEDULERS)}; pass --option scheduler=ddim or scheduler=dpm"
        )
    if kind in ("checkpoint", own):
        return getattr(diffusers, named).from_config(config)
    name = next(name for name, known in _SCHEDULERS.items() if known == kind)
    return getattr(diffusers, name).from_config(config, timestep_spacing="trailing")


def request_schedule(request: Request, checkpoint: Checkpoint) -> Schedule:
    """The schedule of a request.

    Raises:
        UsageError: as :func:`make_scheduler` and :func:`make_schedule`.
        WeightsError: upstream makes no schedule of the checkpoint's config.
    """
    file = checkpoint.named("scheduler", "scheduler_config.json")
    steps = request.num_inference_steps
    with building("schedule", file):
        sampler = make_scheduler(checkpoint, request.options["scheduler"])
        made = make_schedule(sampler, steps, denoising_steps(request))
    if not np.isfinite(made.coefficients).all():
        raise damaged(
            f"{file}: the schedule of {steps} steps is not finite; its betas are wrong"
        )
    return made


def make_schedule(scheduler: Any, steps: int, run: int | None = None) -> Schedule:
    """The schedule of ``steps`` steps of a fresh upstream scheduler.

    Args:
        run: how many of them are run, from the clean end; all when not given. The step
            sizes stay those of the whole schedule, and the first step that is run has
            no previous prediction.

    Raises:
        UsageError: the scheduler's prediction type is unknown to upstream's step.
    """
    kind = scheduler.config["prediction_type"]
    if kind not in ("epsilon", "sample", "v_prediction"):
        raise UsageError(f"prediction_type {kind!r} of the scheduler is not known")
    scheduler.set_timesteps(steps)
    for name in ("alphas_cumprod", "final_alpha_cumprod"):
        setattr(scheduler, name, torch.as_tensor(getattr(scheduler, name)).double())
    timesteps = [int(t) for t in scheduler.timesteps][steps - (run or steps) :]
    found = []
    for index, timestep in enumerate(timesteps):
        if kind == "epsilon" and not scheduler.alphas_cumprod[timestep]:
            raise UsageError(
                "the scheduler predicts epsilon from a timestep without any signal "
                "(rescale_betas_zero_snr); upstream divides by zero there"
            )
        back = timesteps[index - 1] if index else None
        found.append(_coefficients(scheduler, timestep, back))
    return Schedule(
        timesteps=np.array(timesteps, np.int32),
        coefficients=np.array([row for row, _ in found], np.float32),
        noise_draws=tuple(draws for _, draws in found),
        initial_scale=float(scheduler.init_noise_sigma),
    )


def _coefficients(
    scheduler: Any, timestep: int, back: int | None
) -> tuple[list[float], int]:
    """a to f of one step, and how often upstream draws noise in it.

    Args:
        back: the timestep before; the first step has none, and no previous prediction.
    """
    sample, output, previous, _ = torch.eye(4, dtype=torch.float64)
    generator, again = (torch.Generator().manual_seed(0) for _ in range(2))
    if hasattr(scheduler, "get_mult"):
        old = None if back is None else previous
        after, x0 = scheduler.step(
            output, old, timestep, back, sample, generator=generator
        )
    else:
        after, x0 = scheduler.step(output, timestep, sample, return_dict=False)
    draws, noise = 0, torch.zeros(4)
    while not torch.equal(again.get_state(), generator.get_state()):
        draws, noise = draws + 1, torch.randn(4, generator=again, dtype=torch.float64)
    # The last element of every vector but the noise is 0.
    f = after[3] / noise[3] if draws else torch.tensor(0.0)
    to_next = after - f * noise
    a, b = x0[:2]
    d = to_next[1] / b
    return [float(n) for n in (a, b, to_next[0] - d * a, d, to_next[2], f)], draws


def guidance_scales(
    timesteps: np.ndarray, guidance_scale: float, *, dynamic: bool
) -> np.ndarray:
    """The guidance scale of each step, float32 of shape [N].

    With dynamic guidance the scale follows a raised cosine of the timestep; the formula
    (and its mixing of timesteps with the step count) is upstream's, see
    ``CogVideoXPipeline.__call__``.
    """
    steps = len(timesteps)
    if not dynamic:
        return np.full(steps, guidance_scale, np.float32)
    scales = [
        1
        + guidance_scale
        * (1 - math.cos(math.pi * ((steps - int(t)) / steps) ** 5.0))
        / 2
        for t in timesteps
    ]
    return np.array(scales, np.float64).astype(np.float32)
