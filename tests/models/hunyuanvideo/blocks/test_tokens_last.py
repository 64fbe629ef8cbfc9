"""HunyuanVideo's native blocks in the layout of a TPU, against upstream's own code."""

from __future__ import annotations

import pytest
import torch

import tpuport
from tests.models.hunyuanvideo.blocks import test_transformer as form_15
from tests.models.hunyuanvideo.blocks import test_transformer_13b as form_13b
from tests.tolerances import TOLERANCES
from tpuport.core.layers.joint_sequence import JointSequence

CASES = {
    "1.5": lambda: (form_15.make(num_layers=2), form_15.inputs_of(2, "i2v")),
    "13b": lambda: (form_13b.make(), form_13b.inputs_of(2)),
}


@torch.no_grad()
@pytest.mark.parametrize("form", CASES)
@pytest.mark.parametrize("sp", [1, 3])
def test_tokens_last_gives_the_same(
    form: str, sp: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JointSequence, "feature_major", property(lambda self: True))
    module, inputs = CASES[form]()
    program = tpuport.port(module, model="hunyuanvideo", mesh=(1, sp, 1))
    error = (program(**inputs).sample - module(**inputs).sample).abs().max()
    assert float(error) <= TOLERANCES["component float32"]
