"""What LoRAs call the layers of HunyuanVideo and 1.5, and what diffusers calls them.

The names are of Tencent's own code and, where they differ, of ComfyUI's. diffusers'
``scripts/convert_hunyuan_video1_5_to_diffusers.py`` pairs Tencent's with its own. The
last layer's modulation is left out: diffusers has its halves in another order. Single
blocks, which HunyuanVideo alone has, are as upstream's loader has them, which knows
neither kohya's nor ComfyUI's spelling.
"""

from __future__ import annotations

_BLOCK, _OWN_BLOCK = "double_blocks.{}", "transformer_blocks.{}"
_REFINER = "txt_in.individual_token_refiner.blocks.{}"
_OWN_REFINER = "context_embedder.token_refiner.refiner_blocks.{}"


def _stream(
    kind: str, attention: tuple[str, ...], ff: str, norm: str
) -> dict[str, str]:
    """Of the image's or the text's half of a block."""
    query, key, value, out = (f"attn.{name}" for name in attention)
    return {
        f"{kind}_attn_q": query,
        f"{kind}_attn_k": key,
        f"{kind}_attn_v": value,
        f"{kind}_attn.qkv": f"{query} {key} {value}",
        f"{kind}_attn_proj": out,
        f"{kind}_attn.proj": out,
        f"{kind}_mlp.fc1": f"{ff}.net.0.proj",
        f"{kind}_mlp.0": f"{ff}.net.0.proj",
        f"{kind}_mlp.fc2": f"{ff}.net.2",
        f"{kind}_mlp.2": f"{ff}.net.2",
        f"{kind}_mod.linear": f"{norm}.linear",
        f"{kind}_mod.lin": f"{norm}.linear",
    }


_IN_BLOCK = {
    **_stream("img", ("to_q", "to_k", "to_v", "to_out.0"), "ff", "norm1"),
    **_stream(
        *("txt", ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        *("ff_context", "norm1_context"),
    ),
}
_IN_SINGLE = {
    "linear1": "attn.to_q attn.to_k attn.to_v proj_mlp",
    "linear2": "proj_out",
    "modulation.linear": "norm.linear",
    "modulation.lin": "norm.linear",
}
_IN_REFINER = {
    "self_attn_qkv": "attn.to_q attn.to_k attn.to_v",
    "self_attn.qkv": "attn.to_q attn.to_k attn.to_v",
    "self_attn_proj": "attn.to_out.0",
    "self_attn.proj": "attn.to_out.0",
    "mlp.fc1": "ff.net.0.proj",
    "mlp.0": "ff.net.0.proj",
    "mlp.fc2": "ff.net.2",
    "mlp.2": "ff.net.2",
    "adaLN_modulation.1": "norm_out.linear",
}
_BESIDE = {
    "img_in.proj": "x_embedder.proj",
    "time_in.mlp.0": "time_embed.timestep_embedder.linear_1",
    "time_in.mlp.2": "time_embed.timestep_embedder.linear_2",
    "txt_in.input_embedder": "context_embedder.proj_in",
    "byt5_in.fc1": "context_embedder_2.linear_1",
    "byt5_in.fc2": "context_embedder_2.linear_2",
    "byt5_in.fc3": "context_embedder_2.linear_3",
    "vision_in.proj.1": "image_embedder.linear_1",
    "vision_in.proj.3": "image_embedder.linear_2",
    "final_layer.linear": "proj_out",
}


def _within(names: dict[str, str], theirs: str, own: str) -> dict[str, tuple[str, ...]]:
    return {
        f"{theirs}.{name}": tuple(f"{own}.{path}" for path in paths.split())
        for name, paths in names.items()
    }


#: As :class:`~tpuport.core.spec.model_plugin.ModelPlugin` has them.
LORA_NAMES: dict[str, tuple[str, ...]] = {
    **_within(_IN_BLOCK, _BLOCK, _OWN_BLOCK),
    **_within(_IN_SINGLE, "single_blocks.{}", "single_transformer_blocks.{}"),
    **_within(_IN_REFINER, _REFINER, _OWN_REFINER),
    **{name: (path,) for name, path in _BESIDE.items()},
}
