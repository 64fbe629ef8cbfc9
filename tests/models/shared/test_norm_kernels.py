"""Native blocks with their norms as kernels, as on a TPU, against upstream's code.

The kernels run in interpret mode; attention and all else run as on the CPU.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tpuport
from tests.models.cogvideox.test_components import transformer_inputs
from tests.models.conftest import make_transformer
from tests.models.hunyuanvideo import transformers as hunyuanvideo
from tests.tolerances import TOLERANCES
from tpuport.core.layers import joint_sequence as joint
from tpuport.core.layers import token_norms
from tpuport.core.layers.joint_sequence import JointSequence

#: Four heads of 32 make one row of lanes of features.
HEADS = {"num_attention_heads": 4, "attention_head_dim": 32}
ROTARY = {**HEADS, "rope_axes_dim": (8, 12, 12)}
Case = tuple[torch.nn.Module, dict[str, torch.Tensor]]


def _hunyuanvideo(kind: str) -> Case:
    return hunyuanvideo.make(kind, **ROTARY), hunyuanvideo.inputs(kind)


CASES: dict[str, Callable[[], Case]] = {
    "cogvideox": lambda: (
        make_transformer("1.5-5b", **HEADS),
        transformer_inputs("1.5-5b", 2, head_dim=32),
    ),
    # Nothing turns.
    "cogvideox 2b": lambda: (
        make_transformer("2b", **HEADS),
        transformer_inputs("2b", 2),
    ),
    **{
        kind: functools.partial(_hunyuanvideo, kind)
        # In the last one tokens of the first frame have a modulation of their own.
        for kind in ("1.5 i2v", "13b t2v", "13b token replace")
    },
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Norms run as kernels wherever they can; how often each was called."""
    called: Counter[str] = Counter()
    monkeypatch.setattr(JointSequence, "feature_major", property(lambda self: True))
    monkeypatch.setattr(token_norms, "has_kernels", lambda sequence: True)
    padded = joint.padded_length

    def whole_lanes(*args: Any, **kwargs: Any) -> int:
        return padded(*args, **{**kwargs, "platform": "tpu"})

    monkeypatch.setattr(joint, "padded_length", whole_lanes)
    for name in ("modulated_layer_norm", "head_norm_rotary"):
        original = getattr(token_norms, name)

        def run(*args: Any, _name: str = name, _run: Any = original, **kw: Any) -> Any:
            out = _run(*args, **kw)
            called[_name] += 1
            return out

        monkeypatch.setattr(token_norms, name, run)
    return called


#: Both models on both meshes, and every kind of modulation.
KEPT = (
    ("cogvideox", (2, 3, 1)),
    ("cogvideox 2b", (1, 2, 2)),
    ("1.5 i2v", (1, 2, 2)),
    ("13b token replace", (2, 3, 1)),
)


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "mesh"),
    [
        *KEPT,
        *(
            pytest.param(form, mesh, marks=pytest.mark.sweep)
            for mesh in ((1, 1, 1), (2, 3, 1), (1, 2, 2))
            for form in CASES
            if (form, mesh) not in KEPT
        ),
    ],
)
def test_blocks_are_upstreams(
    form: str, mesh: tuple[int, int, int], kernels: Counter[str]
) -> None:
    module, inputs = CASES[form]()
    program = tpuport.port(module, mesh=mesh)
    error = (program(**inputs).sample - module(**inputs).sample).abs().max()
    assert float(error) <= TOLERANCES["component float32"]
    # Under one scan a block is traced once: both norms, queries and keys.
    assert kernels["modulated_layer_norm"] >= 2
    assert kernels["head_norm_rotary"] >= 2


@torch.no_grad()
def test_what_a_kernel_cannot_runs_as_xla_makes_it(kernels: Counter[str]) -> None:
    """A head of 16 has no whole sublanes in its halves."""
    module, inputs = make_transformer("1.5-5b"), transformer_inputs("1.5-5b", 2)
    found = tpuport.port(module, mesh="sp=2")(**inputs).sample
    error = (found - module(**inputs).sample).abs().max()
    assert float(error) <= TOLERANCES["component float32"]
    assert kernels["head_norm_rotary"] == 0
    assert kernels["modulated_layer_norm"] >= 2
