"""The flow-matching schedule is the upstream scheduler's, step for step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from tpuport.core.layers.flow_match import make_flow_schedule
from tpuport.errors import UsageError

CONFIG = {"num_train_timesteps": 1000, "shift": 3.0}


@pytest.mark.parametrize("shift", [1.0, 5.0, 9.0])
@pytest.mark.parametrize("steps", [1, 4, 50])
def test_a_step_is_upstreams(steps: int, shift: float) -> None:
    schedule = make_flow_schedule(CONFIG, steps, shift)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
    x = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
    ours = x.clone()
    for index, timestep in enumerate(scheduler.timesteps):
        assert schedule.timesteps[index] == float(timestep)
        velocity = torch.sin(x * (index + 1))
        ours = ours + torch.from_numpy(schedule.deltas)[index] * velocity
        x = scheduler.step(velocity, timestep, x).prev_sample
        assert torch.equal(ours, x)
    assert len(schedule.deltas) == len(schedule.timesteps) == steps
    # The noise levels end at zero, in one of the steps or after them.
    assert schedule.deltas.sum() == pytest.approx(-1.0, abs=1e-6)


def test_the_next_time_of_each_step_and_zero_after_the_last() -> None:
    schedule = make_flow_schedule(CONFIG, 4, 5.0)
    assert schedule.next_timesteps.tolist() == [*schedule.timesteps.tolist()[1:], 0.0]


@pytest.mark.parametrize("name", ["stochastic_sampling", "use_dynamic_shifting"])
def test_what_is_not_ported_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}, which is not ported"):
        make_flow_schedule({**CONFIG, name: True}, 4, 5.0)
