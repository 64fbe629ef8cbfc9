"""Most parameters of a transformer lie in blocks that become one scanned body."""

from __future__ import annotations

import diffusers
import pytest
import torch

import tpuport
from tests.modules.small import configured, share
from tpuport.core.seam.ported import seam_of

#: What holds fewer than 90 % there.
LESS = {
    # 0.88: the layers that update pairs are in a dict, between the blocks.
    "RFD4ProteinaTransformer",
}


def test_transformers_hold_nine_tenths_in_stacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All classes at full size, on the meta device, take 15 s: 66 of 75 have defaults.
    for kind in (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.modules.conv._ConvNd):
        monkeypatch.setattr(kind, "reset_parameters", lambda module: None)
    shares = {name: share(name) for name in transformers()}
    known = {name: part for name, part in shares.items() if part is not None}
    assert len(known) == 66
    most = {name for name, part in known.items() if part >= 0.9}
    assert known.keys() - most == LESS
    assert len(most) == 65


def transformers() -> list[str]:
    """The names of diffusers' transformer classes."""
    found = []
    for name in dir(diffusers):
        kind = getattr(diffusers, name)
        where = getattr(kind, "__module__", "")
        if where.startswith("diffusers.models.transformers."):
            found += [name] if issubclass(kind, diffusers.ModelMixin) else []
    return found


#: BriaFibo2's loop gives each block of one kind a text of its own.
TURNS = {"AceStepTransformer1DModel": 4, "BriaFibo2Transformer2DModel": 12}


@pytest.mark.parametrize("name", TURNS)
def test_blocks_that_take_turns_stay_one_scan_when_called(name: str) -> None:
    (call,) = configured(name)
    ported = tpuport.port(call.module, progress=False)
    call.on(ported)
    (entry,) = seam_of(ported).entries.values()
    assert entry._blocks is not None
    found = [(len(s.blocks), s.period) for s in entry._blocks if s.path == "layers"]
    assert found == [(TURNS[name], 2)]
