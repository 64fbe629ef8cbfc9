"""CogVideoX's native blocks; ``test_components.py`` has every form on every axis."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import tpuport
from tests.models.cogvideox.test_components import transformer_inputs
from tests.models.conftest import make_transformer
from tests.models.ported import records_of
from tests.tolerances import TOLERANCES
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.seam.entry import PortError
from tpuport.models.cogvideox.plugin import PLUGIN


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max())


#: Heads and sp: an exchange of heads, and a ring beside it; both pad tokens. What
#: attention alone makes of more of them is in ``test_sequence_parallel.py``.
KEPT = ((8, 8), (2, 8))


@torch.no_grad()
@pytest.mark.parametrize(
    ("heads", "sp"),
    [
        *KEPT,
        *(
            pytest.param(heads, sp, marks=pytest.mark.sweep)
            for sp in (1, 2, 3, 4, 5, 8)
            for heads in (2, 3, 8)
            if (heads, sp) not in KEPT
        ),
    ],
)
def test_tokens_and_heads_that_do_not_divide(heads: int, sp: int) -> None:
    module = make_transformer("5b", num_attention_heads=heads, num_layers=2)
    inputs = transformer_inputs("5b", 1)
    program = tpuport.port(module, mesh=(1, sp, 1))
    found, expected = program(**inputs).sample, module(**inputs).sample
    assert worst(found, expected) <= TOLERANCES["component float32"]
    (record,) = records_of(program)
    # Twenty text tokens and three frames of six by eight.
    assert record.padded == -(-(20 + 3 * 6 * 8) // sp) * sp
    assert record.ulysses * record.ring == sp
    if heads % sp == 0:
        assert record.ulysses == sp


@torch.no_grad()
def test_bfloat16_is_no_further_from_float32_than_upstreams() -> None:
    module = make_transformer("5b").to(torch.bfloat16)
    exact = make_transformer("5b").to(torch.bfloat16).float()
    inputs = transformer_inputs("5b", 2)

    def cast(dtype: torch.dtype) -> dict[str, Any]:
        return {
            k: v.to(torch.bfloat16).to(dtype) if k.endswith("hidden_states") else v
            for k, v in inputs.items()
        }

    reference = exact(**cast(torch.float32)).sample
    ours = tpuport.port(module)(**cast(torch.bfloat16)).sample
    theirs = module(**cast(torch.bfloat16)).sample
    error, their_error = (
        float((x.float() - reference).abs().mean()) for x in (ours, theirs)
    )
    assert ours.dtype == torch.bfloat16
    assert error <= their_error


@torch.no_grad()
def test_arguments_that_native_blocks_do_not_take_are_refused() -> None:
    module, inputs = make_transformer("5b"), transformer_inputs("5b", 1)
    with pytest.raises(PortError, match="blocks='upstream'"):
        tpuport.port(module)(**inputs, attention_kwargs={"scale": 0.5})


def test_q_and_k_rows_are_permuted_only_where_tokens_rotate() -> None:
    form = PLUGIN.modules["transformer"].native
    assert form is not None
    (transform,) = form.transforms
    rows = torch.arange(16.0)
    turned = {"use_rotary_positional_embeddings": True, "attention_head_dim": 8}
    expected = [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]
    assert transform.apply(rows, turned).tolist() == expected
    still = {**turned, "use_rotary_positional_embeddings": False}
    assert transform.apply(rows, still).tolist() == rows.tolist()


@torch.no_grad()
@pytest.mark.parametrize(
    "mesh", [pytest.param("dp=1", marks=pytest.mark.sweep), "sp=3,tp=2"]
)
def test_tokens_last_as_on_a_tpu_gives_the_same(
    mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JointSequence, "feature_major", property(lambda self: True))
    module, inputs = make_transformer("1.5-5b"), transformer_inputs("1.5-5b", 2)
    found, expected = tpuport.port(module, mesh=mesh)(**inputs).sample, module(**inputs)
    assert worst(found, expected.sample) <= TOLERANCES["component float32"]


@torch.no_grad()
@pytest.mark.parametrize("sp", [4, pytest.param(8, marks=pytest.mark.sweep)])
def test_thirty_heads_are_padded_on_any_number_of_devices(sp: int) -> None:
    """As many as 2b has: 32 on four devices and on eight."""
    module = make_transformer("2b", num_attention_heads=30, attention_head_dim=8)
    inputs = transformer_inputs("2b", 1)
    one = tpuport.port(module, mesh="dp=1")(**inputs).sample
    program = tpuport.port(module, mesh=(1, sp, 1))
    assert worst(program(**inputs).sample, one) <= TOLERANCES["mesh float32"]
    (record,) = records_of(program)
    assert (record.ulysses, record.ring) == (sp, 1)
    assert record.query[1] == 30
