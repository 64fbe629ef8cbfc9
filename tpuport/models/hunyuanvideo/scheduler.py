"""The sampler of HunyuanVideo: flow matching with a shift of the noise levels."""

from __future__ import annotations

from typing import Any

from tpuport.core.layers.flow_match import (
    FlowSchedule,
    make_flow_schedule,
    make_scheduler,
)
from tpuport.core.spec.stage_work import StageContext


def schedule(ctx: StageContext) -> FlowSchedule:
    """The schedule of a run; the shift is the option ``flow_shift``."""
    return make_flow_schedule(
        ctx.checkpoint.config("scheduler"),
        ctx.request.num_inference_steps,
        float(ctx.request.options["flow_shift"]),
    )


def upstream_scheduler(ctx: StageContext) -> Any:
    """The same as a fresh scheduler of upstream's."""
    config = ctx.checkpoint.config("scheduler")
    return make_scheduler(config, float(ctx.request.options["flow_shift"]))
