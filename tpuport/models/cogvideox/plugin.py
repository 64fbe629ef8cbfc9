"""The CogVideoX plugin."""

from __future__ import annotations

from tpuport.core.spec.component import Component
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.tracing.block_stacks import StackedBlocks
from tpuport.core.tracing.forward_split import ForwardSplit
from tpuport.hookspecs import hookimpl
from tpuport.models.cogvideox import config, sharding

#: What needs torch or jax is named, and imported when it is first used.
HERE = "tpuport.models.cogvideox"


PORT = ModelPort(
    name="cogvideox",
    title="CogVideoX (2b, 5b, 1.5-5b), text, image and video to video",
    pipelines=(
        "CogVideoXPipeline",
        "CogVideoXImageToVideoPipeline",
        "CogVideoXVideoToVideoPipeline",
    ),
    components={
        "text_encoder": Component(
            name="text_encoder",
            class_path="transformers:T5EncoderModel",
            sharding=sharding.TEXT_ENCODER,
            heads=lambda values: int(values.get("num_heads", 8)),
            # The first block computes the position bias of all.
            stacked=(
                StackedBlocks(path="encoder.block", first=1, differ=("layer_idx",)),
            ),
        ),
        "transformer": Component(
            name="transformer",
            class_path="diffusers:CogVideoXTransformer3DModel",
            sharding=sharding.TRANSFORMER,
            split=ForwardSplit(blocks=("transformer_blocks",), head=("hidden_states",)),
            stacked=("transformer_blocks",),
            heads=lambda values: int(values.get("num_attention_heads", 30)),
            native=f"{HERE}.native:TRANSFORMER",
        ),
        "vae": Component(
            name="vae",
            class_path="diffusers:AutoencoderKLCogVideoX",
            sharding=sharding.VAE,
            implementations={"flax": f"{HERE}.flax_stages:FLAX"},
        ),
    },
    stages=f"{HERE}.stages:STAGES",
    variants=config.VARIANTS,
    patches=f"{HERE}.patches:PATCHES",
    overrides="tpuport.patches.standard:OVERRIDES",
    attention=sharding.ATTENTION,
    options=config.OPTIONS,
    detect=config.detect,
    check=config.check,
    latent_shape=f"{HERE}.inputs:latent_shape",
    make_demo=f"{HERE}.demo:make_demo",
    # Raise it when the files of the demo change.
    demo_version="1",
)


@hookimpl
def tpuport_model() -> ModelPort:
    """Hand over the port."""
    return PORT
