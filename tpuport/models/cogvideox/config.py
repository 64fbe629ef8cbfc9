"""The published CogVideoX checkpoints, as data.

Sources: the model cards and configs of the checkpoints named by ``repo_id``, and
diffusers ``pipelines/cogvideo/pipeline_cogvideox.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from tpuport.core.enums import Task
from tpuport.core.spec.request import Request, denoising_steps
from tpuport.core.spec.variant import CUSTOM, FrameRule, Option, SizeRule, Variant
from tpuport.errors import UsageError
from tpuport.models.cogvideox.published import CONFIGS

if TYPE_CHECKING:
    from tpuport.core.weights.checkpoint import Checkpoint

#: One VAE step in space is 8 pixels, a transformer patch is 2 of those.
PIXELS_PER_PATCH = 16

TEXT_TASKS = ("t2v", "v2v")
"""What a checkpoint without image channels can do."""

VARIANT_2B = Variant(
    name="2b",
    title="CogVideoX-2B, text and video to video",
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
    configs=CONFIGS["2b"],
    notes="published in float16; runs in bfloat16 or float32 here",
    tasks=TEXT_TASKS,
)

VARIANT_5B = replace(
    VARIANT_2B,
    name="5b",
    title="CogVideoX-5B, text and video to video",
    repo_id="THUDM/CogVideoX-5b",
    options={"scheduler": "dpm", "dynamic_cfg": True},
    configs=CONFIGS["5b"],
    notes="",
)

VARIANT_5B_I2V = replace(
    VARIANT_5B,
    name="5b-i2v",
    title="CogVideoX-5B-I2V, image to video",
    repo_id="THUDM/CogVideoX-5b-I2V",
    configs=CONFIGS["5b-i2v"],
    notes="its positions are learned for 480x720 and 49 frames: no other size, and "
    "other frame counts run with computed positions, as upstream",
    tasks=("i2v",),
)

VARIANT_15_5B = replace(
    VARIANT_5B,
    name="1.5-5b",
    title="CogVideoX1.5-5B, text and video to video",
    repo_id="THUDM/CogVideoX1.5-5B",
    height=768,
    width=1360,
    num_frames=81,
    fps=16,
    frames=FrameRule(step=16, limit=161),
    configs=CONFIGS["1.5-5b"],
    notes="video to video pads the latents in front, as text to video does; upstream's "
    "own pipeline refuses every frame count of 1.5 there",
)

VARIANT_15_5B_I2V = replace(
    VARIANT_15_5B,
    name="1.5-5b-i2v",
    title="CogVideoX1.5-5B-I2V, image to video",
    repo_id="THUDM/CogVideoX1.5-5B-I2V",
    configs=CONFIGS["1.5-5b-i2v"],
    notes="",
    tasks=("i2v",),
)

DEMO = replace(
    VARIANT_5B,
    name="demo",
    title="a small checkpoint with random weights, made on first use",
    repo_id="",
    height=128,
    width=192,
    num_frames=17,
    num_inference_steps=8,
    frames=FrameRule(step=8),
    configs=CONFIGS["demo"],
    notes="random weights: the video shows that everything runs, not a picture",
)

DEMO_I2V = replace(
    DEMO,
    name="demo-i2v",
    title="the same for image to video",
    configs=CONFIGS["demo-i2v"],
    tasks=("i2v",),
)

PUBLISHED = (
    VARIANT_2B,
    VARIANT_5B,
    VARIANT_5B_I2V,
    VARIANT_15_5B,
    VARIANT_15_5B_I2V,
)
VARIANTS = (DEMO, DEMO_I2V, *PUBLISHED)


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


class Architecture(NamedTuple):
    """What tells the forms of the transformer apart."""

    positions: str
    patch_size_t: int | None
    image: bool
    ofs: bool

    def __str__(self) -> str:
        extra = " and an offset embedding" if self.ofs else ""
        return (
            f"{self.positions} positions, patch_size_t {self.patch_size_t}, "
            f"{'image' if self.image else 'no image'} channels{extra}"
        )


def architecture(config: Mapping[str, Any]) -> Architecture:
    """The form of a transformer's config."""
    positions = "sin-cos"
    if config.get("use_rotary_positional_embeddings"):
        positions = "rotary"
    if config.get("use_learned_positional_embeddings"):
        positions += " and learned"
    return Architecture(
        positions,
        config.get("patch_size_t"),
        int(config.get("in_channels", 16)) == 2 * int(config.get("out_channels") or 16),
        config.get("ofs_embed_dim") is not None,
    )


def sample_size(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns of pixels that a transformer's config is for."""
    rows, columns = config.get("sample_height", 60), config.get("sample_width", 90)
    return int(rows) * 8, int(columns) * 8


def detect(checkpoint: Checkpoint) -> Variant:
    """The variant of a checkpoint, by the form and size of its transformer.

    A checkpoint of no published size gets a variant of its own: upstream's pipeline
    defaults, read from its configs.
    """
    config = checkpoint.config("transformer")
    form = architecture(config)
    for variant in PUBLISHED:
        known = variant.configs["transformer"]
        if form == architecture(known) and all(
            config.get(key) == known[key]
            for key in ("num_attention_heads", "num_layers")
        ):
            return variant
    dpm = checkpoint.class_name("scheduler") == "CogVideoXDPMScheduler"
    frames = int(config.get("sample_frames", 49))
    rule = FrameRule(step=8)
    height, width = sample_size(config)
    return replace(
        VARIANT_2B,
        name=CUSTOM,
        title="a checkpoint of no published size",
        repo_id=checkpoint.source,
        height=height,
        width=width,
        num_frames=frames if rule.allows(frames) else rule.nearest(frames)[0],
        fps=16 if config.get("patch_size_t") else 8,
        frames=rule,
        options={"scheduler": "checkpoint", "dynamic_cfg": dpm},
        configs={},
        notes="",
        tasks=("i2v",) if form.image else TEXT_TASKS,
    )


def check(request: Request, variant: Variant, checkpoint: Checkpoint) -> None:
    """Refuse what this checkpoint cannot do.

    Raises:
        UsageError: a variant of another form than the checkpoint, a task or a size that
            its transformer is not made for, or a number of steps that its schedule does
            not have.
        WeightsError: an autoencoder that compresses time by another ratio.
    """
    checkpoint.expect("vae", "temporal_compression_ratio", 4)
    config = checkpoint.config("transformer")
    form = architecture(config)
    if variant.name in [known.name for known in PUBLISHED]:
        expected = architecture(variant.configs["transformer"])
        if form != expected:
            raise UsageError(
                f"{checkpoint.source} is not a {variant.name} checkpoint: its "
                f"transformer has {form}; {variant.name} has {expected}; leave "
                "--variant out to go by the checkpoint"
            )
    if form.image != (request.task == Task.IMAGE):
        takes = "an image" if form.image else "no image"
        raise UsageError(
            f"{checkpoint.source}: its transformer takes {takes}, and task "
            f"{request.task} was asked for with variant {variant.name}; leave "
            "--variant out to go by the checkpoint"
        )
    _check_positions(request, config, form)
    _check_steps(request, checkpoint)


def _check_positions(
    request: Request, config: Mapping[str, Any], form: Architecture
) -> None:
    """Refuse a size or a number of text tokens that there are no positions for."""
    rows, columns = sample_size(config)
    if "learned" in form.positions and (request.height, request.width) != (
        rows,
        columns,
    ):
        raise UsageError(
            f"size {request.width}x{request.height} asked for; this checkpoint's "
            f"positions are learned for {columns}x{rows} (width x height) alone"
        )
    if form.patch_size_t is not None:
        for name, asked, limit in (
            ("height", request.height, rows),
            ("width", request.width, columns),
        ):
            if asked > limit:
                raise UsageError(
                    f"{name} {asked} is beyond this checkpoint's positions, which end "
                    f"at {limit}; nearest valid {name} is {limit}"
                )
    tokens = request.options.get("max_sequence_length")
    limit = int(config.get("max_text_seq_length", 226))
    if tokens and tokens != limit and form.positions != "rotary":
        raise UsageError(
            f"max_sequence_length={tokens}: this checkpoint's positions are for "
            f"{limit} text tokens; leave the option out"
        )


def _check_steps(request: Request, checkpoint: Checkpoint) -> None:
    """Refuse a number of steps, or a config, that there is no schedule of."""
    from tpuport.models.cogvideox.scheduler import request_schedule

    scheduler = checkpoint.config("scheduler")
    train = int(scheduler.get("num_train_timesteps", 1000))
    steps = request.num_inference_steps
    if steps > train:
        raise UsageError(f"{steps} denoising steps asked for; the schedule has {train}")
    if not denoising_steps(request):
        raise UsageError(
            f"strength {request.strength} of {steps} steps leaves no step to run; give "
            f"at least 1/{steps}"
        )
    request_schedule(request, checkpoint)
