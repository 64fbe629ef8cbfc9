"""The stages of a call are told, and a scheduler that is copied stays its own."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import diffusers
import torch

from tpuport.core.drive.driving import driving
from tpuport.core.enums import Backend
from tpuport.core.reports import Reporter
from tpuport.core.seam.journal import Asked, Between, Journal


def scheduler() -> Any:
    made = diffusers.FlowMatchEulerDiscreteScheduler()
    made.set_timesteps(3)
    return made


def asked(name: str) -> Asked:
    return Asked(name, torch.nn.Identity(), (None,), {}, torch.nn.Identity())


def test_steps_are_counted_and_upstreams_step_comes_back() -> None:
    own = scheduler()
    pipeline = SimpleNamespace(components={"scheduler": own})
    signature = inspect.signature(own.step)
    x = torch.ones(1, 4)
    with driving(pipeline, Journal(Reporter()), Backend.TPUPORT) as drive:
        assert inspect.signature(own.step) == signature
        for timestep in own.timesteps:
            own.step(x, timestep, x)
    assert [report.stage for report in drive.reports] == ["encode", "denoise"]
    assert len(drive.steps) == 3
    assert "step" not in vars(own)


def test_steps_that_are_left_out_are_not_waited_for() -> None:
    """From a video, denoising begins further on, and still ends before the decode."""
    own = scheduler()
    own.set_begin_index(1)
    pipeline = SimpleNamespace(components={"scheduler": own})
    x = torch.ones(1, 4)
    journal = Journal(Reporter())
    with driving(pipeline, journal, Backend.TPUPORT) as drive:
        for timestep in own.timesteps[1:]:
            journal.call(asked("transformer"))
            own.step(x, timestep, x)
        journal.call(asked("vae"))
    assert [report.stage for report in drive.reports] == ["encode", "denoise", "decode"]


def test_upstreams_own_stages_are_told_too() -> None:
    """No seam stands at the modules: hooks tell of their calls, and go again."""
    own = scheduler()
    vae = torch.nn.Sequential(torch.nn.Linear(4, 4))
    parts = {"scheduler": own, "transformer": torch.nn.Linear(4, 4), "vae": vae}
    x = torch.ones(1, 4)
    journal = Journal(Reporter())
    with driving(SimpleNamespace(components=parts), journal, Backend.DIFFUSERS) as told:
        for timestep in own.timesteps:
            own.step(parts["transformer"](x), timestep, x)
            assert told.stage == "denoise"
        vae[0](x)  # as decode does, which is no forward
    assert [report.stage for report in told.reports] == ["encode", "denoise", "decode"]
    parts["transformer"](x)
    assert len(told.reports) == 3


def test_a_copied_scheduler_steps_by_itself() -> None:
    """Pipelines with sound copy theirs: each steps as often as the other."""
    own = scheduler()
    pipeline = SimpleNamespace(components={"scheduler": own})
    x = torch.ones(1, 4)
    with driving(pipeline, Journal(Reporter()), Backend.TPUPORT) as drive:
        sound = copy.deepcopy(own)
        for timestep in own.timesteps:
            (video,) = own.step(x, timestep, x, return_dict=False)
            (found,) = sound.step(x, timestep, x, return_dict=False)
            assert torch.equal(found, video)
    assert own.step_index == sound.step_index == 3
    assert len(drive.steps) == 3


def test_the_host_is_ahead_of_the_devices_by_one_step() -> None:
    """A step is told of when its result is there, and a stage ends with all."""
    own, there = scheduler(), list[int]()
    pipeline = SimpleNamespace(components={"scheduler": own})
    x = torch.ones(1, 4)
    journal = Journal(Reporter())

    class Devices(Between):
        made = 0

        def step(self) -> Callable[[], None]:
            self.made += 1
            return functools.partial(there.append, self.made)

    journal.between = Devices()
    with driving(pipeline, journal, Backend.TPUPORT) as drive:
        for number, timestep in enumerate(own.timesteps):
            own.step(x, timestep, x)
            assert there == list(range(1, number + 1))
            assert len(drive.steps) == number
        journal.call(asked("vae"))
        assert there == [1, 2, 3]
    assert len(drive.steps) == 3
