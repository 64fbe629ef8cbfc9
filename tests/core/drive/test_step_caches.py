"""A step cache of any denoiser; the oracle is upstream's code with the same cache."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.core.drive.test_tape import Run, equal, on_disk
from tests.pipelines.example import all_examples, difference
from tests.tolerances import TOLERANCES
from tpuport.core.drive.driving import driving
from tpuport.core.drive.step_caches import (
    StepCacheError,
    StepCaches,
    standing,
    step_caches,
)
from tpuport.core.enums import Backend
from tpuport.core.reports import Reporter
from tpuport.core.seam.journal import Journal
from tpuport.core.spec.step_cache import StepCache

TAYLOR = "taylorseer:start=1,end=6,interval=3"
DEEP = "deepcache:start=1,end=6,interval=3"


def parse(text: str) -> StepCache:
    found = StepCache.parse(text)
    assert found is not None
    return found


class Always(StepCache):
    """A cache whose steps are all full."""

    def schedule(self, steps: int) -> tuple[bool, ...]:
        return (True,) * steps


def run(name: str, cache: StepCache | None, **more: Any) -> Run:
    """Latents of an example in seven steps; its text is encoded by upstream's code."""
    more = {"num_inference_steps": 7, "output_type": "latent", **more}
    on_host = ("text_encoder",) if more.get("port") else ()
    return Run(all_examples()[name], cache=cache, on_host=on_host, **more)


@pytest.mark.parametrize(
    ("name", "text", "programs"),
    [
        ("WanPipeline", TAYLOR, 2),  # guidance in two calls
        ("WanPipeline", DEEP, 2),
        ("CogVideoXPipeline", TAYLOR, 2),  # native blocks
        ("CogVideoXPipeline", DEEP, 2),
        ("LTX2Pipeline", TAYLOR, 6),  # two streams, three kinds of calls
    ],
)
def test_programs_and_upstreams_code_agree(
    name: str, text: str, programs: int, tmp_path: Path
) -> None:
    expected = run(name, parse(text))
    found = run(name, parse(text), port=tmp_path)
    assert found.arrays is not None
    assert expected.arrays is not None
    assert difference(found.arrays, expected.arrays) < TOLERANCES["video float32"]
    # Steps 2, 3 and 5 of 7 are cached.
    assert found.calls == expected.calls
    assert found.calls[1] * 7 == found.calls[0] * 3
    assert found.programs["transformer"] == programs
    exact = run(name, None)
    assert exact.arrays is not None
    assert difference(expected.arrays, exact.arrays) > 1e-3


@pytest.mark.parametrize("name", ["WanPipeline", "AnimateDiffPipeline"])
def test_a_run_of_full_steps_is_the_plain_run(name: str) -> None:
    cached = run(name, Always(method="taylorseer"))
    assert cached.calls[0] > cached.calls[1] == 0
    assert equal(cached.arrays, run(name, None).arrays)


def test_an_expert_that_takes_over_begins_with_full_steps() -> None:
    """Steps 0 and 1 of the first expert are full, and 4 and 5 of the second."""
    cache = parse("taylorseer:start=1,end=8,interval=7")
    caches, _ = drive({"transformer": Toy(), "transformer_2": Toy()}, cache, 8, 4)
    assert caches.calls == (8, 4)


def test_a_call_that_missed_a_full_step_is_full() -> None:
    """Step 4 is full, and the second call of a step is not made there."""
    cache = parse("taylorseer:start=1,end=8,interval=3")
    caches, _ = drive({"transformer": Toy()}, cache, 8, unguided=())
    assert caches.calls == (16, 8)
    caches, _ = drive({"transformer": Toy()}, cache, 8, unguided=(4,))
    # The second call is full in step 5, and cached again in step 6.
    assert caches.calls == (15, 7)


def test_a_short_pass_after_the_first_is_full() -> None:
    caches, _ = drive({"transformer": Toy()}, parse("taylorseer:start=1,end=8"), 8)
    assert caches.calls[1] > 0
    made = caches.calls
    caches.stepping(torch.arange(2.0), 2)
    assert (caches._full, caches.calls) == ((True, True), made)


def test_features_that_are_linear_in_the_step_are_predicted_exactly() -> None:
    toy = Toy()
    cache = parse("taylorseer:start=2,end=9,interval=4,order=1")
    caches, answers = drive({"transformer": toy}, cache, steps=10)
    assert caches.calls == (10, 5)
    _, expected = drive({"transformer": toy}, None, steps=10)
    for one, other in zip(answers, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=0)
    # Of features before the last block, the newest is kept, which is another one.
    _, kept = drive({"transformer": toy}, parse("deepcache:start=2,end=9"), steps=10)
    assert not torch.allclose(kept[3], expected[3], atol=1e-2, rtol=0)


@pytest.mark.parametrize("after", range(1, 7))
def test_a_killed_run_goes_on_to_the_same_bytes(after: int, tmp_path: Path) -> None:
    whole = run("WanPipeline", parse(TAYLOR))
    killed = run("WanPipeline", parse(TAYLOR), kill_after=after + 1)
    assert killed.arrays is None
    assert killed.recorded.stepped == after
    before = on_disk(killed.recorded, tmp_path)
    again = run("WanPipeline", parse(TAYLOR), before=before)
    assert equal(again.arrays, whole.arrays)


def test_what_stays_on_the_devices_goes_to_a_checkpoint(tmp_path: Path) -> None:
    ported = functools.partial(run, "WanPipeline", parse(TAYLOR), port=tmp_path)
    whole, killed = ported(), ported(kill_after=4)
    before = on_disk(killed.recorded, tmp_path)
    assert [len(one) for one in before.histories.values()] == [2, 2]
    assert equal(ported(before=before).arrays, whole.arrays)


class Block(torch.nn.Module):
    """Adds what is linear in the time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4) / 2)

    def forward(self, time: torch.Tensor, x: torch.Tensor, skip: Any = None) -> Any:
        return x @ self.weight + time * self.weight[0]


class Toy(torch.nn.Module):
    """A denoiser whose features are linear in the time, and whose head is not."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(timestep, x)
        return torch.sin(x) * timestep


class Scheduler:
    """Steps through whole numbers, and leaves the latents as they are."""

    def __init__(self, steps: int) -> None:
        self.timesteps = torch.arange(float(steps))

    def step(self, answer: Any, timestep: Any, x: Any) -> Any:
        return x


def drive(
    modules: dict[str, Any],
    cache: StepCache | None,
    steps: int,
    switch: int = 99,
    unguided: tuple[int, ...] | None = None,
) -> tuple[StepCaches, list[torch.Tensor]]:
    """Drive toys; from step ``switch`` on the last one. Returns their answers.

    With ``unguided``, there is a second call in all steps but these.
    """
    scheduler, x, answers = Scheduler(steps), torch.ones(2, 4), []
    pipeline = SimpleNamespace(components={"scheduler": scheduler, **modules})
    caches = step_caches(pipeline, cache or Always(method="taylorseer"))
    with (
        torch.no_grad(),
        standing(caches.modules.values()),
        driving(pipeline, Journal(Reporter()), Backend.DIFFUSERS) as told,
    ):
        told.caches = caches
        for number, timestep in enumerate(scheduler.timesteps):
            one = [*modules.values()][-(number >= switch)]
            answers.append(one(x, timestep))
            if unguided is not None and number not in unguided:
                one(x, timestep)
            scheduler.step(answers[-1], timestep, x)
    return caches, answers


class Skipping(Toy):
    """Reads behind its blocks what the first of them made."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](timestep, x)
        x = first
        for block in self.blocks[1:]:
            x = block(timestep, x)
        whole = torch.zeros(2, 8)
        whole[:, :4] = first
        return whole[:, 4:] + whole[:, :4] + x


class Skipped(Toy):
    """Its last block takes what the first one made beside the state."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](timestep, x)
        return self.blocks[2](timestep, self.blocks[1](timestep, first), skip=first)


class Keeping(Toy):
    """Its blocks write to a list that somebody may read later."""

    def forward(self, x: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        kept: list[Any] = []
        for block in self.blocks:
            x = block(timestep, x, kept)
        return x


def _keep(self: Any, time: Any, x: Any, skip: Any = None) -> Any:
    skip.append(x)
    return x


def test_a_forward_that_does_not_split_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, deep = parse("taylorseer"), parse("deepcache")
    with pytest.raises(StepCacheError, match="more than the state of blocks is read"):
        drive({"transformer": Skipping()}, one, steps=8)
    with pytest.raises(StepCacheError, match=r"transformer \(Skipped\) has no place"):
        drive({"transformer": Skipped()}, deep, steps=8)
    drive({"transformer": Skipped()}, one, steps=8)
    with pytest.raises(StepCacheError, match="it has no list of blocks"):
        drive({"transformer": torch.nn.Linear(4, 4)}, one, steps=8)
    with pytest.raises(StepCacheError, match="has no denoiser"):
        drive({"vae": Toy()}, one, steps=8)
    with pytest.raises(StepCacheError, match="would cache none of 2 steps"):
        drive({"transformer": Toy()}, one, steps=2)
    monkeypatch.setattr(Block, "forward", _keep)
    with pytest.raises(StepCacheError, match="no list of blocks hands its state on"):
        drive({"transformer": Keeping()}, one, steps=8)
