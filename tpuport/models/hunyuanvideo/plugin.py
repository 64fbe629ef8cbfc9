"""The HunyuanVideo plugin: 1.5 (text and image to video) and the original 13b."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tpuport.core.spec.component import Component
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.tracing.block_stacks import StackedBlocks
from tpuport.core.tracing.forward_split import ForwardSplit
from tpuport.hookspecs import hookimpl
from tpuport.models.hunyuanvideo import config, sharding

#: What needs torch or jax is named, and imported when it is first used.
HERE = "tpuport.models.hunyuanvideo"

#: The two blocks that refine the text, in both forms of the model.
REFINER = "context_embedder.token_refiner.refiner_blocks"


def _heads(default: int) -> Callable[[Mapping[str, Any]], int]:
    """How many heads a config has; ``default`` is upstream's, which files may omit."""
    return lambda values: int(values.get("num_attention_heads", default))


def _layers(path: str, first: int = 0) -> tuple[StackedBlocks, ...]:
    """A language model's blocks, which know their index for the sake of a cache."""
    return (StackedBlocks(path=path, first=first, differ=("layer_idx",)),)


def _by_name(*components: Component) -> dict[str, Component]:
    return {component.name: component for component in components}


COMPONENTS_15 = _by_name(
    Component(
        name="text_encoder",
        class_path="transformers:Qwen2_5_VLTextModel",
        sharding=sharding.QWEN,
        stacked=_layers("layers"),
    ),
    Component(
        name="text_encoder_2",
        class_path="transformers:T5EncoderModel",
        sharding=sharding.BYT5,
        # The first block computes the position bias of all.
        stacked=_layers("encoder.block", first=1),
        # As the model's authors run it.
        dtype="float32",
    ),
    Component(
        name="image_encoder",
        class_path="transformers:SiglipVisionModel",
        sharding=sharding.SIGLIP,
        # See encoders.STORED_PREFIXES.
        stored_prefix="vision_model.",
        heads=_heads(12),
        stacked=("encoder.layers",),
    ),
    Component(
        name="transformer",
        class_path="diffusers:HunyuanVideo15Transformer3DModel",
        sharding=sharding.TRANSFORMER_15,
        layouts=sharding.LAYOUTS_15,
        split=ForwardSplit(blocks=("transformer_blocks",), head=("hidden_states",)),
        stacked=(REFINER, "transformer_blocks"),
        heads=_heads(16),
        native=f"{HERE}.native:TRANSFORMER_15",
    ),
    Component(
        name="vae",
        class_path="diffusers:AutoencoderKLHunyuanVideo15",
        sharding=sharding.VAE_15,
    ),
)

COMPONENTS_13B = _by_name(
    Component(
        name="text_encoder",
        class_path="transformers:LlamaModel",
        sharding=sharding.LLAMA,
        stacked=_layers("layers"),
        heads=_heads(32),
    ),
    Component(
        name="text_encoder_2",
        class_path="transformers:CLIPTextModel",
        sharding=sharding.CLIP,
        stored_prefix="text_model.",
        ignored=(r"(text_model\.)?embeddings\.position_ids",),
        stacked=("encoder.layers",),
    ),
    Component(
        name="transformer",
        class_path="diffusers:HunyuanVideoTransformer3DModel",
        sharding=sharding.TRANSFORMER_13B,
        layouts=sharding.LAYOUTS_13B,
        split=ForwardSplit(
            blocks=("transformer_blocks", "single_transformer_blocks"),
            head=("hidden_states",),
        ),
        stacked=(REFINER, "transformer_blocks", "single_transformer_blocks"),
        heads=_heads(24),
        native=f"{HERE}.native_13b:TRANSFORMER_13B",
    ),
    Component(
        name="vae",
        class_path="diffusers:AutoencoderKLHunyuanVideo",
        sharding=sharding.VAE_13B,
    ),
)

#: A form of the model, from what is the form's own.
_form = functools.partial(
    ModelPort,
    name="hunyuanvideo",
    title="HunyuanVideo 1.5 and 13b, text and image to video",
    variants=config.VARIANTS,
    overrides="tpuport.patches.standard:OVERRIDES",
    attention=sharding.ATTENTION,
    options=config.OPTIONS,
    bucket=config.bucket,
    make_demo=f"{HERE}.demo:make_demo_of",
    # Raise it when the files of the demo change.
    demo_version="1",
)

PORT_13B = _form(
    form=config.FORM_13B,
    pipelines=("HunyuanVideoPipeline",),
    components=COMPONENTS_13B,
    stages=f"{HERE}.stages_13b:STAGES",
    patches=f"{HERE}.patches_13b:PATCHES",
    detect=config.detect_13b,
    check=config.check_13b,
    guided=config.guided_13b,
    latent_shape=f"{HERE}.stages_13b:latent_shape",
)

PORT = _form(
    form=config.FORM_15,
    pipelines=("HunyuanVideo15Pipeline", "HunyuanVideo15ImageToVideoPipeline"),
    components=COMPONENTS_15,
    stages=f"{HERE}.stages:STAGES",
    patches=f"{HERE}.patches:PATCHES",
    detect=config.detect_15,
    check=config.check_15,
    check_variant=config.check_variant_15,
    write_processors=f"{HERE}.demo:write_processors",
    latent_shape=f"{HERE}.stages:latent_shape",
    forms=(PORT_13B,),
)


@hookimpl
def tpuport_model() -> ModelPort:
    """Hand over the port."""
    return PORT
