"""The samplers of CogVideoX as one linear update with coefficients from upstream.

A step of DDIM and of the second-order DPM solver is linear in the sample x, the model
output m, the previous prediction and the noise:

    x0   = a * x + b * m
    next = c * x + d * x0 + e * previous_x0 + f * noise

The six coefficients are computed on the host by the upstream scheduler object itself,
in float64, and handed to the compiled step as inputs. Sources: diffusers
``CogVideoXDDIMScheduler.step`` and ``CogVideoXDPMScheduler.step`` (formulas 12 and 16
of the DDIM paper, arXiv 2010.02502; DPM-Solver++, arXiv 2211.01095).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tpuport.core.spec.request import Request, denoising_steps
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.configs import building
from tpuport.errors import UsageError, WeightsError

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
        raise WeightsError(
            f"{file}: the schedule of {steps} steps is not finite; check its betas"
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
    scheduler.set_timesteps(steps)
    timesteps = [int(t) for t in scheduler.timesteps][steps - (run or steps) :]
    second_order = hasattr(scheduler, "get_mult")
    rows: list[list[float]] = []
    draws: list[int] = []
    for index, timestep in enumerate(timesteps):
        back = timesteps[index - 1] if index else None
        previous = timestep - scheduler.config.num_train_timesteps // steps
        alpha = _alpha(scheduler, timestep)
        alpha_prev = (
            _alpha(scheduler, previous)
            if previous >= 0
            else float(scheduler.final_alpha_cumprod)
        )
        to_x0 = _x0_coefficients(scheduler.config, alpha)
        if second_order:
            update, drawn = _dpm_update(
                scheduler,
                alpha,
                alpha_prev,
                None if back is None else _alpha(scheduler, back),
                last=previous < 0,
            )
        else:
            a = math.sqrt((1 - alpha_prev) / (1 - alpha))
            update = [a, math.sqrt(alpha_prev) - math.sqrt(alpha) * a, 0.0, 0.0]
            drawn = 0
        rows.append([*to_x0, *update])
        draws.append(drawn)
    return Schedule(
        timesteps=np.array(timesteps, np.int32),
        coefficients=np.array(rows, np.float64).astype(np.float32),
        noise_draws=tuple(draws),
        initial_scale=float(scheduler.init_noise_sigma),
    )


def _alpha(scheduler: Any, timestep: int) -> float:
    return float(scheduler.alphas_cumprod[timestep])


def _x0_coefficients(config: Mapping[str, Any], alpha: float) -> list[float]:
    """a and b of ``x0 = a * sample + b * model_output``."""
    kind = config["prediction_type"]
    if kind == "epsilon":
        if not alpha:
            raise UsageError(
                "the scheduler predicts epsilon from a timestep without any signal "
                "(rescale_betas_zero_snr); upstream divides by zero there"
            )
        return [1 / math.sqrt(alpha), -math.sqrt(1 - alpha) / math.sqrt(alpha)]
    if kind == "sample":
        return [0.0, 1.0]
    if kind == "v_prediction":
        return [math.sqrt(alpha), -math.sqrt(1 - alpha)]
    raise UsageError(f"prediction_type {kind!r} of the scheduler is not known")


def _dpm_update(
    scheduler: Any,
    alpha: float,
    alpha_prev: float,
    alpha_back: float | None,
    *,
    last: bool,
) -> tuple[list[float], int]:
    """c, d, e, f of one solver step, and how often upstream draws noise in it."""

    def wrap(value: float | None) -> Any:
        return None if value is None else torch.tensor(value, dtype=torch.float64)

    args = (wrap(alpha), wrap(alpha_prev), wrap(alpha_back))
    h, r, _, _ = scheduler.get_variables(*args)
    mult = [float(m) for m in scheduler.get_mult(h, r, *args)]
    noise = float((1 - args[1]) ** 0.5 * (1 - (-2 * h).exp()) ** 0.5)
    if alpha_back is None or last:
        # First order: on the first step there is no previous prediction, and on the
        # last one every noise level is 0.
        return [mult[0], -mult[1], 0.0, noise], 1
    return [mult[0], -mult[1] * mult[2], mult[1] * mult[3], noise], 2


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
