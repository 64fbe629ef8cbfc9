"""Previews from Python, and beside the steps of a run."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.core.drive.test_on_devices import programs, small
from tests.core.heard import Heard
from tests.pipelines.example import all_examples, made, run
from tpuport.core.preview import previews
from tpuport.core.preview.decode_input import NoPreviewError
from tpuport.core.preview.previews import PreviewsBeside

__all__ = ["programs", "small"]


def test_upstreams_callback_makes_frames_of_packed_latents(
    programs: list[str], small: None
) -> None:
    """No more programs, and the same bytes. 15 s: LTX is compiled."""
    pipeline, call = made(all_examples()["LTXPipeline"])
    with pytest.raises(tpuport.TpuportError, match="port"):
        tpuport.preview(pipeline, call)
    found: list[np.ndarray] = []
    with tpuport.ported(pipeline, progress=False):
        plain = run(pipeline, call)
        before = sorted(programs)
        preview = tpuport.preview(pipeline, call)

        def show(pipe: Any, step: int, time: Any, given: dict[str, Any]) -> Any:
            found.append(preview(given["latents"]))
            return given

        shown = run(pipeline, call | {"callback_on_step_end": show})
    assert sorted(programs) == before
    assert all(np.array_equal(*each) for each in zip(plain, shown, strict=True))
    assert len(found) == call["num_inference_steps"]
    frames, height, width = plain[0].shape[1:4]
    assert {one.dtype for one in found} == {np.dtype("uint8")}
    assert found[0].ndim == 4
    assert found[0].shape[3] == 3
    assert found[0].shape[0] <= frames
    assert found[0].shape[1] * width == found[0].shape[2] * height
    assert not np.array_equal(found[0], found[-1])


class Steps:
    """Stands for a preview: its pipeline's scheduler gives numbers, which are shown."""

    def __init__(self, error: Exception | None = None) -> None:
        self.on_step: Any = None
        self.heard, self.prepared, self.error = False, 0, error
        self.told, self.shown = Heard(), list[float]()
        self.changed = threading.Condition()

    def prepare(self, load: Any) -> None:
        self.prepared += 1
        if self.error is not None:
            raise self.error

    def frames(self, latents: torch.Tensor) -> Any:
        return latents.numpy()

    def close(self) -> None:
        self.closed = True

    def show(self, frames: np.ndarray) -> None:
        with self.changed:
            self.shown.append(float(frames[0]))
            self.changed.notify()

    def step(self, number: float) -> torch.Tensor:
        self.heard = True
        latents = torch.tensor([number])
        self.on_step(latents)
        return latents

    def wait(self, count: int) -> None:
        """Until so many are shown, and the next may come."""
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.shown) >= count, 60)
        while self.beside._free_at == math.inf:
            time.sleep(0.001)

    def run(self, **how: Any) -> PreviewsBeside:
        found: Any = self
        self.beside = PreviewsBeside(found, self.show, self.told, **how)
        return self.beside


def test_latents_are_shown_as_they_were_and_no_more_often_than_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a step writes later is not seen; steps within the pause are not read."""
    steps, given = Steps(), [False]
    with steps.run(wanted=lambda: given[0]):
        steps.step(1)  # given back from a tape
        given[0] = True
        monkeypatch.setattr(previews, "_PAUSE", 0.0)
        monkeypatch.setattr(previews, "SHARE", 1e9)
        steps.step(2).zero_()
        steps.wait(1)
        monkeypatch.setattr(previews, "_PAUSE", 3600.0)
        steps.step(3).zero_()
        steps.wait(2)
        steps.step(4)
    assert steps.shown == [2, 3]
    assert steps.prepared == 1
    assert steps.closed
    assert not steps.told.about("no preview")


def test_what_cannot_be_shown_is_told_once() -> None:
    steps = Steps(NoPreviewError("none at all"))
    with steps.run():
        steps.step(1)
        steps.step(2)
    assert steps.told.about("no preview") == ["no preview: none at all"]
    assert steps.prepared == 1
    with Steps().run() as beside:
        pass
    assert beside._reporter.about("made no step")  # type: ignore[attr-defined]
    failing = Steps()
    failing.show = lambda frames: frames["no"]  # type: ignore
    with failing.run():
        failing.step(1)
    assert len(failing.told.about("no preview")) == 1
