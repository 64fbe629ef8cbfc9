"""The sampler of HunyuanVideo: flow matching with a shift of the noise levels."""

from __future__ import annotations

import numpy as np

from tpuport.core.layers.flow_match import FlowSchedule, make_flow_schedule
from tpuport.core.spec.request import Request
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.configs import building
from tpuport.errors import damaged


def request_schedule(request: Request, checkpoint: Checkpoint) -> FlowSchedule:
    """The schedule of a request; the shift is the option ``flow_shift``.

    Raises:
        UsageError: the config asks for what is not ported.
        WeightsError: the checkpoint has another scheduler, or upstream makes no
            schedule of its config.
    """
    checkpoint.check_class("scheduler", "diffusers:FlowMatchEulerDiscreteScheduler")
    file = checkpoint.named("scheduler", "scheduler_config.json")
    config, steps = checkpoint.config("scheduler"), request.num_inference_steps
    with building("schedule", file):
        shift = float(request.options["flow_shift"])
        made = make_flow_schedule(config, steps, shift)
    if not (np.isfinite(made.timesteps).all() and np.isfinite(made.deltas).all()):
        raise damaged(f"{file}: the schedule of {steps} steps is not finite")
    return made
