"""Latents of any step, as ``decode`` is given them, with nothing known of the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.pipelines.example import Example, all_examples, made
from tpuport.core.drive.driving import called
from tpuport.core.enums import Backend
from tpuport.core.preview.decode_input import FirstStep, NoPreviewError, _Operators
from tpuport.core.preview.previews import Preview
from tpuport.core.reports import Reporter
from tpuport.core.seam.journal import Asked, Journal
from tpuport.core.seam.values import tensors_in

#: By what comes between the last step and ``decode``.
GATE = (
    "WanPipeline",  # a mean and a spread for each channel
    "CogVideoXPipeline",  # frames and channels change places
    "LTXImageToVideoPipeline",  # packed, a frame of the picture, noise
    "LTX2Pipeline",  # packed, and another scheduler steps for sound
    "HunyuanVideo15Pipeline",
    "StableVideoDiffusionPipeline",  # frames become a batch
    "Kandinsky5T2VPipeline",  # written into a part of another tensor
    "FluxModularPipeline",  # a picture, packed
    "Flux2KleinModularPipeline",  # scattered into zeros
)
#: Why others have no preview.
NONE = {
    "Cosmos2TextToImagePipeline": "decodes nothing",  # its call asks for latents
    "AnyFlowFARPipeline": "several passes",
}


class Heard:
    """A run by upstream's code, with what it made and what was heard.

    Attributes:
        last: the result of the last step before ``decode``.
        decoded: what ``decode`` was given first.
    """

    def __init__(self, one: Example, *, ahead: bool) -> None:
        pipeline, call = made(one)
        torch.manual_seed(3)
        generator = torch.Generator("cpu").manual_seed(3)
        given = {"output_type": "np", **call, "generator": generator}
        journal = Journal(Reporter())
        self.last = self.decoded = torch.empty(0)
        self.preview = Preview(pipeline, given, journal)
        heard = journal.on_answer
        if ahead:
            self.preview.on_step = self._step
            journal.on_answer = lambda *told: [heard(*told), self._called(*told)]
        else:
            self.preview.close()
        output, _ = called(pipeline, given, journal, Backend.DIFFUSERS)
        self.arrays = [np.asarray(v) for v in output.values() if v is not None]

    def _step(self, latents: torch.Tensor) -> None:
        if not self.last.numel():
            self.preview.prepare()
        if not self.decoded.numel():
            self.last = latents.clone()

    def _called(self, asked: Asked, answer: Any) -> None:
        if asked.name.endswith(".decode") and not self.decoded.numel():
            self.decoded = tensors_in((asked.args, asked.kwargs))[0]


@pytest.mark.parametrize("name", GATE)
def test_latents_arrive_as_decode_is_given_them(name: str) -> None:
    """And the run is what it is without: frames to the bit."""
    one = all_examples()[name]
    found, plain = Heard(one, ahead=True), Heard(one, ahead=False)
    decode = found.preview._decode
    assert decode is not None
    assert torch.equal(decode.of(found.last), found.decoded)
    assert torch.equal(decode.of(found.last), found.decoded)  # a second time too
    assert not torch.equal(decode.of(torch.zeros_like(found.last)), found.decoded)
    frames = found.preview(found.last)
    assert frames.shape[1:] == (*found.decoded.shape[-2:], 3)
    pairs = zip(found.arrays, plain.arrays, strict=True)
    assert all(np.array_equal(one, other) for one, other in pairs)
    with pytest.raises(NoPreviewError, match="not what a step gives"):
        found.preview(found.last[..., :1])


def test_a_call_ahead_draws_from_generators_of_its_own() -> None:
    def seeded(seed: int) -> torch.Generator:
        return torch.Generator("cpu").manual_seed(seed)

    given = {"generator": [seeded(1), seeded(2)], "prompt": ["a", "b"]}
    first = FirstStep(SimpleNamespace(components={}), given, Journal(Reporter()))
    torch.rand(5, generator=given["generator"][1])  # of the run
    states = [one.get_state() for one in given["generator"]]
    own = first._own_arguments()
    assert own["prompt"] == ["a", "b"]
    for seed, one in enumerate(own["generator"], 1):
        found = torch.rand(3, generator=one)
        assert torch.equal(found, torch.rand(3, generator=seeded(seed)))
    for one, state in zip(given["generator"], states, strict=True):
        assert torch.equal(one.get_state(), state)


def test_what_is_added_to_a_tensor_of_before_is_added_once() -> None:
    other, operators = torch.ones(2, 3), _Operators()
    with operators:
        operators.begin(latents := torch.zeros(3))
        other[0] += latents
        wanted = other * 2
    operators.settle()
    for number in (5.0, 7.0):
        found = operators.again(torch.full((3,), number), wanted)
        assert found.tolist() == [[2 * (1 + number)] * 3, [2.0] * 3]


@pytest.mark.parametrize("name", NONE)
def test_a_pipeline_without_such_a_way_says_so(name: str) -> None:
    with pytest.raises(NoPreviewError, match=NONE[name]):
        Heard(all_examples()[name], ahead=True)
