"""Small transformers of both models, what they are called with, and their ports.

The names of kinds begin with the model: ``"1.5 ..."`` or ``"13b ..."``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import diffusers
import torch

from tpuport.core.enums import Blocks
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.seam.ported import port_module
from tpuport.core.spec.model_plugin import ModelPlugin
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.weights.sharding import DEFAULT_LAYOUT
from tpuport.kernels.attention.choice import AttentionChoice
from tpuport.plugins import get_model
from tpuport.targets import general_target, place_for_port

Inputs = dict[str, torch.Tensor]

#: One block or one refiner layer cannot show what padding does to the next.
SIZES: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_refiner_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 24,
    "rope_axes_dim": (2, 2, 4),
}
OWN: dict[str, dict[str, Any]] = {
    "1.5": {"in_channels": 9, "text_embed_2_dim": 20, "image_embed_dim": 12},
    "13b": {"num_single_layers": 3, "pooled_projection_dim": 12},
}
KINDS: dict[str, dict[str, Any]] = {
    "1.5 t2v": {},
    "1.5 i2v": {},
    "1.5 meanflow": {"use_meanflow": True},
    "13b t2v": {},
    "13b no guidance input": {"guidance_embeds": False},
    "13b latent concat": {"in_channels": 9, "image_condition_type": "latent_concat"},
    "13b token replace": {"image_condition_type": "token_replace"},
    "13b other norms": {"qk_norm": "layer_norm"},
}
#: Tokens of the language model, of ByT5, and of an image.
TEXT, GLYPHS, IMAGE = 11, 7, 5
#: Valid ones of the first; of 13b the first so many.
VALID = (6, 11)
#: Video tokens: 2 x 4 x 6.
VIDEO = 48


def form(kind: str) -> str:
    return kind.partition(" ")[0]


def plugin_of(kind: str) -> ModelPlugin:
    found = get_model("hunyuanvideo" if form(kind) == "1.5" else "hunyuanvideo-13b")
    assert isinstance(found, ModelPlugin)
    return found


def make(kind: str, **changed: Any) -> Any:
    """A small transformer, with norms and biases that are not ones and zeros."""
    classes = {
        "1.5": diffusers.HunyuanVideo15Transformer3DModel,
        "13b": diffusers.HunyuanVideoTransformer3DModel,
    }
    torch.manual_seed(0)
    config = SIZES | OWN[form(kind)] | KINDS[kind] | changed
    module = classes[form(kind)](**config).eval().requires_grad_(False)
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return module


def inputs(kind: str, batch: int = 2, text: int = TEXT) -> Inputs:
    """Ragged lengths; padding is noise, of 1.5 anywhere in a text."""
    draw = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(batch, *shape, generator=draw)

    channels = (SIZES | OWN[form(kind)] | KINDS[kind])["in_channels"]
    size = (2, 4, 6) if form(kind) == "1.5" else (2, 8, 12)
    found = {
        "hidden_states": normal(channels, *size),
        "timestep": torch.tensor([500.0, 37.0])[:batch],
        "encoder_hidden_states": normal(text, 24),
    }
    valid = torch.arange(text) < torch.tensor(VALID)[:batch, None]
    if form(kind) == "13b":
        found["encoder_attention_mask"] = valid.long()
        found["pooled_projections"] = normal(12)
        if "no guidance" not in kind:
            found["guidance"] = torch.tensor([6000.0, 1000.0])[:batch]
        return found
    order = torch.randperm(text, generator=draw)
    found["encoder_attention_mask"] = valid[:, order]
    found["encoder_hidden_states_2"] = normal(GLYPHS, 20)
    # The first item has no valid glyph.
    glyphs = torch.arange(GLYPHS) % 2 < torch.tensor([0, 1])[:batch, None]
    found["encoder_attention_mask_2"] = glyphs
    found["image_embeds"] = normal(IMAGE, 12) * float("i2v" in kind)
    if "meanflow" in kind:
        found["timestep_r"] = torch.tensor([250.0, 12.0])[:batch]
    return found


def ported(
    module: torch.nn.Module,
    kind: str,
    mesh: str = "dp=1",
    blocks: Blocks = Blocks.NATIVE,
    without: Sequence[str] = (),
    attention: str = "auto",
    layout: str = DEFAULT_LAYOUT,
) -> Any:
    """The module ported by the model's plugin.

    Args:
        without: names of patches that are left out.
    """
    plugin = plugin_of(kind)
    names = {patch.name for patch in plugin.patches}
    assert names >= set(without)
    own = replace(
        plugin,
        modules={type(module).__name__: plugin.modules["transformer"]},
        patches=tuple(one for one in plugin.patches if one.name not in without),
    )
    settings = RunSettings(attention=AttentionChoice.parse(attention))
    general = general_target(place_for_port(MeshSpec.parse(mesh)), settings)
    return port_module(module, general.of_plugin(own, blocks, layout))


def apart(found: Any, expected: Any) -> float:
    """The largest difference of two samples."""
    assert found.sample.shape == expected.sample.shape
    assert expected.sample.isfinite().all()
    return float((found.sample.float() - expected.sample.float()).abs().max())
