"""Each patch on the HunyuanVideo-1.5 transformer cures what it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import pytest
import torch

from tests.models.hunyuanvideo.blocks.test_transformer import (
    GLYPHS,
    IMAGE,
    PATCHES,
    TEXT,
    VIDEO,
    Inputs,
    Ported,
    assert_close,
    eagerly,
    inputs_of,
    make,
    upstream,
)
from tests.models.jaxprs import arrays_in, squares
from tpuport.core.tracing.patching import Patch, applied, inspect_patches
from tpuport.kernels.attention.attention import attention
from tpuport.models.hunyuanvideo.patches import TRANSFORMER_15


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return make()


# --- no array of S x S


def long_inputs() -> Inputs:
    """More text than the tiles of blockwise attention and than any weight is wide."""
    inputs = inputs_of(1, "i2v", size=(2, 10, 15))
    text = 2100
    inputs["encoder_hidden_states"] = torch.zeros(1, text, 24)
    inputs["encoder_attention_mask"] = torch.ones(1, text, dtype=torch.bool)
    return inputs


@pytest.mark.parametrize("mesh", [None, (1, 8, 1), (1, 1, 8)], ids=str)
def test_no_array_has_two_dims_of_the_sequence(
    mesh: tuple[int, int, int] | None, module: torch.nn.Module
) -> None:
    inputs = long_inputs()
    text = inputs["encoder_hidden_states"].shape[1]
    closed = Ported(module, mesh, implementation="blockwise").trace(inputs)
    assert (1, text + 300 + GLYPHS + IMAGE, 8, 8) in set(arrays_in(closed.jaxpr))
    assert squares(closed.jaxpr, text) == []
    # Rotary tables are computed in the program and not stored with it.
    assert [c.shape for c in closed.consts if getattr(c, "size", 1) > 64] == []


def test_the_formula_makes_the_only_squares_there_are(module: torch.nn.Module) -> None:
    """With attention by its formula: those of its scores, at both lengths."""
    joint = VIDEO + TEXT + GLYPHS + IMAGE

    def count(jaxpr: Any, size: int) -> int:
        return sum(s.count(size) >= 2 for s in arrays_in(jaxpr))

    def formula(size: int) -> int:
        q = jax.ShapeDtypeStruct((2, 8, size, 8), jnp.float32)
        lengths = jax.ShapeDtypeStruct((2,), jnp.int32)

        def call(q: Any, lengths: Any) -> Any:
            return attention(
                q, q, q, kv_lengths=lengths, platform="cpu", implementation="reference"
            )

        return count(jax.make_jaxpr(call)(q, lengths).jaxpr, size)

    program = Ported(module, implementation="reference")
    traced = program.trace(inputs_of(2, "i2v")).jaxpr
    assert formula(joint) > 0
    assert count(traced, joint) == 3 * formula(joint)
    assert count(traced, TEXT) == 2 * formula(TEXT)


# --- each patch


def test_every_patch_applies_here() -> None:
    states = {s.name: s.state for s in inspect_patches(TRANSFORMER_15)}
    assert set(states.values()) == {"applicable"}, states


def test_upstream_is_as_before_outside_of_the_patches() -> None:
    from diffusers.models.transformers import transformer_hunyuan_video15 as code

    def found() -> list[Callable[..., Any]]:
        return [
            code.HunyuanVideo15AttnProcessor2_0.__call__,
            code.HunyuanVideo15IndividualTokenRefiner.forward,
            code.HunyuanVideo15Transformer3DModel.forward,
        ]

    before = found()
    with applied(TRANSFORMER_15):
        assert all(a is not b for a, b in zip(found(), before, strict=True))
    assert found() == before


def without(*names: str) -> tuple[Patch, ...]:
    kept = tuple(p for p in PATCHES if p.name not in names)
    assert len(kept) == len(PATCHES) - len(names)
    return kept


def test_without_its_patch_forward_cannot_be_traced(module: torch.nn.Module) -> None:
    program = Ported(module, patches=without("hunyuanvideo15-forward"))
    with pytest.raises(jax.errors.ConcretizationTypeError):
        program.trace(inputs_of(1, "i2v"))


def test_without_its_patch_the_refiner_has_squares_of_its_text(
    module: torch.nn.Module,
) -> None:
    inputs = long_inputs()
    text = inputs["encoder_hidden_states"].shape[1]
    program = Ported(
        module,
        patches=without("hunyuanvideo15-token-refiner", "hunyuanvideo15-refiner-block"),
        implementation="blockwise",
    )
    assert (1, 1, text, text) in squares(program.trace(inputs).jaxpr, text)


def test_the_refiner_and_its_blocks_belong_together(module: torch.nn.Module) -> None:
    # The one hands over what the other takes: a number of tokens, not a mask.
    for name in ("hunyuanvideo15-token-refiner", "hunyuanvideo15-refiner-block"):
        with pytest.raises((ValueError, TypeError)):
            Ported(module, patches=without(name)).trace(inputs_of(2, "i2v"))


class Attend(torch.nn.Module):
    """The attention of one block by itself."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.attn = module.get_submodule("transformer_blocks.0.attn")

    def forward(
        self,
        video: torch.Tensor,
        text: torch.Tensor,
        mask: torch.Tensor | None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        tokens = self.attn(
            hidden_states=video, encoder_hidden_states=text, attention_mask=mask
        )
        return (torch.cat(tokens, dim=1),)


def joint_inputs() -> Inputs:
    generator = torch.Generator().manual_seed(4)
    return {
        "video": torch.randn(2, 9, 64, generator=generator),
        "text": torch.randn(2, 6, 64, generator=generator),
    }


def test_without_its_patch_the_attention_has_squares_of_all_tokens(
    module: torch.nn.Module,
) -> None:
    inputs = {name: x.repeat(1, 200, 1) for name, x in joint_inputs().items()}
    tokens = 15 * 200
    mask = torch.ones(2, 6 * 200, dtype=torch.bool)
    squared = {}
    for given, patches in (
        (mask, without("hunyuanvideo15-joint-attention")),
        (mask.sum(dim=1), PATCHES),
    ):
        program = Ported(Attend(module), patches=patches, implementation="blockwise")
        traced = program.trace({**inputs, "mask": given})
        squared[given.ndim] = squares(traced.jaxpr, tokens)
    assert (2, 1, tokens, tokens) in squared[2]
    assert squared[1] == []


@pytest.mark.parametrize("lengths", [[6, 6], [4, 1], [2, 0]], ids=str)
def test_the_attention_with_lengths_is_upstreams_with_a_mask(
    lengths: list[int], module: torch.nn.Module
) -> None:
    inputs, counts = joint_inputs(), torch.tensor(lengths)
    mask = torch.arange(6) < counts[:, None]
    block = Attend(module)
    expected = upstream(block, {**inputs, "mask": mask})
    found = Ported(block)({**inputs, "mask": counts})
    valid = torch.cat([torch.ones(2, 9, dtype=torch.bool), mask], dim=1)
    assert_close(found[valid], expected[valid])
    assert found.isfinite().all()


def test_the_attention_without_a_mask_attends_to_all(module: torch.nn.Module) -> None:
    inputs, block = joint_inputs(), Attend(module)
    all_valid = torch.ones(2, 6, dtype=torch.bool)
    expected = upstream(block, {**inputs, "mask": all_valid})
    assert_close(Ported(block)(inputs, mask=None), expected)
    assert_close(eagerly(block, inputs, mask=None), expected)


def test_a_mask_of_tokens_is_refused_by_the_attention(module: torch.nn.Module) -> None:
    given = {**joint_inputs(), "mask": torch.ones(2, 6, dtype=torch.bool)}
    with pytest.raises(ValueError, match=r"number of valid text tokens.*\[2, 6\]"):
        eagerly(Attend(module), given)


class Refine(torch.nn.Module):
    """The refiner's layers by themselves."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.layers = module.get_submodule("context_embedder.token_refiner")

    def forward(
        self,
        text: torch.Tensor,
        temb: torch.Tensor,
        mask: torch.Tensor | None,
        return_dict: bool = False,
    ) -> tuple[torch.Tensor]:
        return (self.layers(text, temb, mask),)


def test_the_refiner_gives_upstreams_valid_tokens_in_their_places(
    module: torch.nn.Module,
) -> None:
    generator = torch.Generator().manual_seed(5)
    text = torch.randn(3, TEXT, 64, generator=generator)
    mask = torch.rand(3, TEXT, generator=generator) < 0.5
    mask[2] = False
    inputs = {
        "text": text,
        "temb": torch.randn(3, 64, generator=generator),
        "mask": mask.long(),
    }
    layers = Refine(module)
    expected = upstream(layers, inputs)
    found = Ported(layers)(inputs)
    assert_close(found[mask], expected[mask])
    assert found.isfinite().all()
    # Padding attends to the valid tokens here and to nothing upstream.
    padding = ~mask
    padding[2] = False
    assert (found[padding] - expected[padding]).abs().max() > 1e-2
    assert_close(found[2], expected[2])
    del inputs["mask"]
    assert_close(Ported(layers)(inputs, mask=None), upstream(layers, inputs, mask=None))


def test_glyphs_are_needed(module: torch.nn.Module) -> None:
    inputs = inputs_of(1, "t2v no tokens")
    del inputs["encoder_attention_mask_2"]
    with pytest.raises(ValueError, match="needs encoder_hidden_states_2 and"):
        eagerly(module, inputs)


def test_the_scale_of_loras_reaches_them(
    module: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
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
    eagerly(module, inputs_of(1, "i2v"), attention_kwargs={"scale": 0.5})
    assert seen == [("scale_lora_layers", 0.5), ("unscale_lora_layers", 0.5)]
