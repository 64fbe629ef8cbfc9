"""The text and image encoders of HunyuanVideo as pure functions, for traced programs.

Each takes a module bound to its weights and JAX arrays, and gives what upstream's
pipeline takes from the same encoder. Legend: R rows (prompts or images), L tokens, E
width.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from tpuport.core.tracing.ported_module import BoundModule

#: The state upstream takes: ``hidden_states[-(num_hidden_layers_to_skip + 1)]``.
HIDDEN_STATE = -3

STORED_PREFIXES: Mapping[str, str] = {
    "SiglipVisionModel": "vision_model.",
    "CLIPTextModel": "text_model.",
}
"""What published files put before every weight's name, by class.

transformers 5 dropped an inner module of these classes, and their names with it; its
``from_pretrained`` takes both. Source: transformers ``conversion_mapping.py``.
"""


def language_states(
    model: BoundModule, input_ids: jax.Array, attention_mask: jax.Array
) -> jax.Array:
    """States [R, L, E] of ``Qwen2_5_VLTextModel`` or ``LlamaModel`` on [R, L].

    The third last ones; the compiler drops the last two layers. Not cropped: the
    template's tokens are in front. Rows of padding are finite. Sources: diffusers
    ``HunyuanVideo15Pipeline._get_mllm_prompt_embeds`` and
    ``HunyuanVideoPipeline._get_llama_prompt_embeds``.
    """
    out = model(
        input_ids,
        attention_mask=attention_mask,
        output_hidden_states=True,
        use_cache=False,
    )
    states: jax.Array = out.hidden_states[HIDDEN_STATE]
    return states


def byt5_states(
    model: BoundModule, input_ids: jax.Array, attention_mask: jax.Array
) -> jax.Array:
    """States [R, L, E] of ``T5EncoderModel`` on bytes [R, L].

    A row with an empty mask is of a prompt that quotes no text: it gives zeros, as
    upstream does without running the encoder. Source: diffusers
    ``HunyuanVideo15Pipeline._get_byt5_prompt_embeds``.
    """
    mask = attention_mask.astype(jnp.float32)
    states: jax.Array = model(input_ids, attention_mask=mask).last_hidden_state
    quotes = (attention_mask != 0).any(axis=1)
    return jnp.where(quotes[:, None, None], states, jnp.zeros_like(states))


def siglip_states(model: BoundModule, pixel_values: jax.Array) -> jax.Array:
    """States [R, tokens, E] of ``SiglipVisionModel`` on pixels [R, 3, height, width].

    Source: diffusers ``HunyuanVideo15ImageToVideoPipeline._get_image_embeds``.
    """
    states: jax.Array = model(pixel_values).last_hidden_state
    return states


def clip_pooled(model: BoundModule, input_ids: jax.Array) -> jax.Array:
    """The state of the end-of-text token [R, E] of ``CLIPTextModel`` on ids [R, L].

    Source: diffusers ``HunyuanVideoPipeline._get_clip_prompt_embeds``.
    """
    pooled: jax.Array = model(input_ids).pooler_output
    return pooled
