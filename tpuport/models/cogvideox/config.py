"""The published CogVideoX checkpoints, as data.

Sources: the model cards and configs of the checkpoints named by ``repo_id``, and
diffusers ``pipelines/cogvideo/pipeline_cogvideox.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tpuport.core.request import Request
from tpuport.core.spec import FrameRule, Option, SizeRule, Variant
from tpuport.errors import UsageError

if TYPE_CHECKING:
    from tpuport.core.checkpoint import Checkpoint

#: One VAE step in space is 8 pixels, a transformer patch is 2 of those.
PIXELS_PER_PATCH = 16

_T5_XXL: Mapping[str, Any] = {
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
_TRANSFORMER: Mapping[str, Any] = {
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "time_embed_dim": 512,
    "text_embed_dim": 4096,
    "max_text_seq_length": 226,
    "patch_size": 2,
}
_VAE: Mapping[str, Any] = {"latent_channels": 16, "temporal_compression_ratio": 4}

VARIANT_2B = Variant(
    name="2b",
    title="CogVideoX-2B, text to video",
    repo_id="THUDM/CogVideoX-2b",
    height=480,
    width=720,
    num_frames=49,
    fps=8,
    num_inference_steps=50,
    guidance_scale=6.0,
    dtype="bfloat16",
    frames=FrameRule(step=8, limit=49),
    sizes=SizeRule(multiple=PIXELS_PER_PATCH),
    options={"scheduler": "ddim", "dynamic_cfg": False},
    configs={
        "text_encoder": _T5_XXL,
        "transformer": {
            **_TRANSFORMER,
            "num_attention_heads": 30,
            "num_layers": 30,
            "sample_height": 60,
            "sample_width": 90,
            "sample_frames": 49,
            "use_rotary_positional_embeddings": False,
        },
        "vae": {**_VAE, "scaling_factor": 1.15258426},
    },
    notes="published in float16; runs in bfloat16 or float32 here",
)

VARIANT_5B = Variant(
    name="5b",
    title="CogVideoX-5B, text to video",
    repo_id="THUDM/CogVideoX-5b",
    height=480,
    width=720,
    num_frames=49,
    fps=8,
    num_inference_steps=50,
    guidance_scale=6.0,
    dtype="bfloat16",
    frames=FrameRule(step=8, limit=49),
    sizes=SizeRule(multiple=PIXELS_PER_PATCH),
    options={"scheduler": "dpm", "dynamic_cfg": True},
    configs={
        "text_encoder": _T5_XXL,
        "transformer": {
            **_TRANSFORMER,
            "num_attention_heads": 48,
            "num_layers": 42,
            "sample_height": 60,
            "sample_width": 90,
            "sample_frames": 49,
            "use_rotary_positional_embeddings": True,
        },
        "vae": {**_VAE, "scaling_factor": 0.7},
    },
)

VARIANT_15_5B = Variant(
    name="1.5-5b",
    title="CogVideoX1.5-5B, text to video",
    repo_id="THUDM/CogVideoX1.5-5B",
    height=768,
    width=1360,
    num_frames=81,
    fps=16,
    num_inference_steps=50,
    guidance_scale=6.0,
    dtype="bfloat16",
    frames=FrameRule(step=16, limit=161),
    sizes=SizeRule(multiple=PIXELS_PER_PATCH),
    options={"scheduler": "dpm", "dynamic_cfg": True},
    configs={
        "text_encoder": _T5_XXL,
        "transformer": {
            **_TRANSFORMER,
            "num_attention_heads": 48,
            "num_layers": 42,
            "patch_size_t": 2,
            "sample_height": 300,
            "sample_width": 300,
            "sample_frames": 81,
            "use_rotary_positional_embeddings": True,
        },
        "vae": {**_VAE, "scaling_factor": 0.7},
    },
)

DEMO = Variant(
    name="demo",
    title="a small checkpoint with random weights, made on first use",
    repo_id="",
    height=128,
    width=192,
    num_frames=17,
    fps=8,
    num_inference_steps=8,
    guidance_scale=6.0,
    dtype="bfloat16",
    frames=FrameRule(step=8),
    sizes=SizeRule(multiple=PIXELS_PER_PATCH),
    options={"scheduler": "dpm", "dynamic_cfg": True},
    configs={
        "text_encoder": {
            "vocab_size": 512,
            "d_model": 64,
            "d_kv": 8,
            "d_ff": 128,
            "num_layers": 2,
            "num_heads": 8,
            "feed_forward_proj": "gated-gelu",
            "tie_word_embeddings": False,
        },
        "transformer": {
            "num_attention_heads": 8,
            "attention_head_dim": 16,
            "in_channels": 16,
            "out_channels": 16,
            "time_embed_dim": 64,
            "text_embed_dim": 64,
            "num_layers": 3,
            "max_text_seq_length": 226,
            "patch_size": 2,
            "patch_size_t": 2,
            "sample_height": 128,
            "sample_width": 128,
            "sample_frames": 17,
            "use_rotary_positional_embeddings": True,
        },
        "vae": {
            **_VAE,
            "block_out_channels": [16, 32, 32, 32],
            "norm_num_groups": 8,
            "layers_per_block": 1,
            "scaling_factor": 0.7,
        },
    },
    notes="random weights: the video shows that everything runs, not a picture",
)

VARIANTS = (DEMO, VARIANT_2B, VARIANT_5B, VARIANT_15_5B)


def _parse_flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"true": True, "on": True, "yes": True, "1": True}
    words |= {"false": False, "off": False, "no": False, "0": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise UsageError(f"{value!r} is neither true nor false") from None


def _parse_count(value: Any) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        raise UsageError(f"{value!r} is not a whole number") from None
    if count < 1:
        raise UsageError(f"{count} must be at least 1")
    return count


OPTIONS = (
    Option(
        name="scheduler",
        help="sampler: the checkpoint's own, or ddim or dpm made from its config",
        parse=str,
        choices=("checkpoint", "ddim", "dpm"),
    ),
    Option(
        name="dynamic_cfg",
        help="lower the guidance scale as the timesteps fall",
        parse=_parse_flag,
    ),
    Option(
        name="max_sequence_length",
        help="text tokens, as upstream's pipeline takes; by default the checkpoint's",
        parse=_parse_count,
    ),
)

_SCHEDULERS = {"CogVideoXDDIMScheduler": "ddim", "CogVideoXDPMScheduler": "dpm"}


def scheduler_kind(checkpoint: Checkpoint) -> str:
    """``"ddim"`` or ``"dpm"``: the checkpoint's own sampler.

    Raises:
        UsageError: the checkpoint has another scheduler.
    """
    entry = checkpoint.index.get("scheduler") or [None, None]
    if entry[1] not in _SCHEDULERS:
        raise UsageError(
            f"{checkpoint.source}: scheduler {entry[1]} is not one of "
            f"{', '.join(_SCHEDULERS)}; pass --option scheduler=ddim or scheduler=dpm"
        )
    return _SCHEDULERS[entry[1]]


def architecture(config: Mapping[str, Any]) -> tuple[bool, int | None]:
    """(rotary positions?, patch_size_t): what tells the three forms apart."""
    return (
        bool(config.get("use_rotary_positional_embeddings", False)),
        config.get("patch_size_t"),
    )


def detect(checkpoint: Checkpoint) -> Variant:
    """The variant of a checkpoint, by the form and size of its transformer.

    A checkpoint of no published size gets a variant of its own: upstream's pipeline
    defaults, read from its configs.
    """
    config = checkpoint.config("transformer")
    for variant in (VARIANT_2B, VARIANT_5B, VARIANT_15_5B):
        known = variant.configs["transformer"]
        if architecture(config) == architecture(known) and all(
            config.get(key) == known[key]
            for key in ("num_attention_heads", "num_layers")
        ):
            return variant
    kind = _SCHEDULERS.get((checkpoint.index.get("scheduler") or [0, 0])[1], "ddim")
    frames = int(config.get("sample_frames", 49))
    rule = FrameRule(step=8)
    return Variant(
        name="custom",
        title="a checkpoint of no published size",
        repo_id=checkpoint.source,
        height=int(config.get("sample_height", 60)) * 8,
        width=int(config.get("sample_width", 90)) * 8,
        num_frames=frames if rule.allows(frames) else rule.nearest(frames)[0],
        fps=16 if config.get("patch_size_t") else 8,
        num_inference_steps=50,
        guidance_scale=6.0,
        dtype="bfloat16",
        frames=rule,
        sizes=SizeRule(multiple=PIXELS_PER_PATCH),
        options={"scheduler": "checkpoint", "dynamic_cfg": kind == "dpm"},
    )


def check(request: Request, variant: Variant, checkpoint: Checkpoint) -> None:
    """Refuse what this checkpoint cannot do.

    Raises:
        UsageError: a size beyond the rotary table of a 1.5 checkpoint, more steps than
            the schedule has, or a variant of another form than the checkpoint.
    """
    config = checkpoint.config("transformer")
    if variant.name in ("2b", "5b", "1.5-5b"):
        known = architecture(variant.configs["transformer"])
        if architecture(config) != known:
            names = {True: "rotary", False: "sin-cos"}
            rotary, patch = architecture(config)
            raise UsageError(
                f"{checkpoint.source} is not a {variant.name} checkpoint: its "
                f"transformer has {names[rotary]} positions and patch_size_t {patch}, "
                f"{variant.name} has {names[known[0]]} and {known[1]}; leave --variant "
                "out to go by the checkpoint"
            )
    if config.get("patch_size_t") is not None:
        for name, asked in (("height", request.height), ("width", request.width)):
            limit = int(config.get(f"sample_{name}", 0)) * 8
            if asked > limit:
                raise UsageError(
                    f"{name} {asked} is beyond this checkpoint's positions, which end "
                    f"at {limit}; nearest valid {name} is {limit}"
                )
    tokens = request.options.get("max_sequence_length")
    limit = int(config.get("max_text_seq_length", 226))
    if tokens and tokens != limit and not architecture(config)[0]:
        raise UsageError(
            f"max_sequence_length={tokens}: this checkpoint's positions are for "
            f"{limit} text tokens; leave the option out"
        )
    scheduler = checkpoint.config("scheduler")
    train = int(scheduler.get("num_train_timesteps", 1000))
    if request.num_inference_steps > train:
        raise UsageError(
            f"{request.num_inference_steps} denoising steps asked for; the schedule "
            f"has {train}"
        )
