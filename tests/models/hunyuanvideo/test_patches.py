"""Each patch on a transformer cures what it is for; native blocks have places of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.hunyuanvideo.transformers import VIDEO, inputs, make, ported
from tests.models.jaxprs import squares
from tests.models.ported import entry_of
from tpuport.core.enums import Blocks
from tpuport.core.seam.entry import PortError
from tpuport.core.tracing.patching import applied

BOTH = ("1.5 i2v", "13b t2v")
UPSTREAM = Blocks.UPSTREAM


LONG = 2100
"""Tokens: more than tiles of blockwise attention have, or a weight is wide."""


def long_inputs(kind: str) -> dict[str, torch.Tensor]:
    """Of a text and a video that are each shorter."""
    given = inputs(kind, batch=1, text=LONG // 2)
    latents = given["hidden_states"]
    frames = LONG // 2 // (VIDEO // 2) + 1
    shape = (1, latents.shape[1], frames, *latents.shape[3:])
    return {**given, "hidden_states": torch.zeros(shape)}


def squares_of(kind: str, mesh: str = "dp=1", **how: Any) -> list[tuple[int, ...]]:
    """Arrays with two dims of the text's length, or of more."""
    program = ported(make(kind), kind, mesh, attention="blockwise", **how)
    program(**long_inputs(kind))
    traced = entry_of(program).programs[-1].traced
    return squares(traced.jaxpr, LONG)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("blocks", Blocks)
def test_no_array_has_two_dims_of_the_sequence(kind: str, blocks: Blocks) -> None:
    assert squares_of(kind, "sp=8" if kind in BOTH[:1] else "dp=1", blocks=blocks) == []


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("1.5 i2v", "hunyuanvideo15-forward"),
        # The one hands over what the other takes: a number of tokens, not a mask.
        ("1.5 i2v", "hunyuanvideo15-joint-attention"),
    ],
)
def test_a_patch_cannot_be_left_out_alone(kind: str, name: str) -> None:
    program = ported(make(kind), kind, blocks=UPSTREAM, without=[name])
    with pytest.raises(PortError):
        program(**inputs(kind))


def test_the_output_of_a_single_block_is_not_of_five_widths() -> None:
    """Of attention and feed-forward side by side, three with this small one."""
    kind, wide = "13b t2v", []
    for without in ((), ("hunyuanvideo-single-block-output",)):
        program = ported(make(kind), kind, blocks=UPSTREAM, without=without)
        program(**inputs(kind, batch=1))
        text = str(entry_of(program).programs[-1].traced.jaxpr)
        wide.append("f32[1,59,192]" in text)
    assert wide == [False, True]


@pytest.mark.parametrize("kind", BOTH)
def test_the_scale_of_loras_reaches_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream decorates its forward with this."""
    import diffusers.utils
    from diffusers.utils import peft_utils

    seen: list[tuple[str, float]] = []
    monkeypatch.setattr(diffusers.utils, "USE_PEFT_BACKEND", True)
    for name in ("scale_lora_layers", "unscale_lora_layers"):
        monkeypatch.setattr(
            peft_utils, name, lambda model, weight, of=name: seen.append((of, weight))
        )
    program = ported(make(kind), kind, blocks=UPSTREAM)
    program(**inputs(kind, 1), attention_kwargs={"scale": 0.5})
    assert seen[:2] == [("scale_lora_layers", 0.5), ("unscale_lora_layers", 0.5)]


def test_refused_arguments_say_what_to_give() -> None:
    from tpuport.models.hunyuanvideo.patches import TRANSFORMER_15
    from tpuport.models.hunyuanvideo.patches_13b import attend_tokens

    given = inputs("1.5 t2v", 1)
    del given["encoder_attention_mask_2"]
    with (
        applied(TRANSFORMER_15),
        pytest.raises(ValueError, match="needs encoder_hidden_states_2 and"),
    ):
        make("1.5 t2v")(**given)
    x = torch.zeros(2, 6, 1, 8)
    with pytest.raises(ValueError, match=r"number of valid keys.*\[2, 6\]"):
        attend_tokens(x, x, x, torch.ones(2, 6))
    with pytest.raises(NotImplementedError, match="has no is_causal"):
        attend_tokens(x, x, x, is_causal=True)
