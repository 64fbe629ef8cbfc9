"""The published HunyuanVideo checkpoints, as data.

Sources: the model cards and configs of the checkpoints named by ``repo_id``; diffusers
``pipelines/hunyuan_video1_5`` and ``pipelines/hunyuan_video``; the table of released
models of Tencent-Hunyuan/HunyuanVideo-1.5.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from tpuport.core.enums import Task
from tpuport.core.spec.request import Request
from tpuport.core.spec.variant import CUSTOM, FrameRule, Option, SizeRule, Variant
from tpuport.errors import UsageError
from tpuport.models.hunyuanvideo.published import CONFIGS

if TYPE_CHECKING:
    from tpuport.core.weights.checkpoint import Checkpoint

FORM_15 = ""
"""The form of every 1.5 checkpoint, text and image to video alike."""
FORM_13B = "13b"
"""The form of the original model: other encoders, single-stream blocks, other VAE."""

#: Side of the square that a size class has the area of; upstream's ``target_size``.
TARGET_SIZES = {"480p": 640, "720p": 960}
SIZES = {"480p": (480, 848), "720p": (720, 1280)}

#: Steps that a step-distilled checkpoint was made for; its model card names them.
DISTILLED_STEPS = (4, 8, 12)

_MULTIPLE = 16
_HUB = "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-"


VARIANT_13B = Variant(
    name="13b",
    title="HunyuanVideo (13B), text to video",
    repo_id="hunyuanvideo-community/HunyuanVideo",
    height=720,
    width=1280,
    num_frames=129,
    fps=24,
    num_inference_steps=50,
    guidance_scale=6.0,
    dtype="bfloat16",
    frames=FrameRule(step=4),
    sizes=SizeRule(multiple=_MULTIPLE),
    options={"flow_shift": 7.0, "true_cfg_scale": 1.0},
    configs=CONFIGS["13b"],
    notes="the guidance scale is an input of the model, not two predictions",
    form=FORM_13B,
)

DEMO_13B = replace(
    VARIANT_13B,
    name="demo-13b",
    title="the same of the 13b form",
    repo_id="",
    height=96,
    width=160,
    num_frames=17,
    num_inference_steps=8,
    configs=CONFIGS["demo-13b"],
    notes="random weights: the video shows that everything runs, not a picture",
)

DEMO = replace(
    DEMO_13B,
    name="demo",
    title="a small checkpoint with random weights, made on first use",
    options={"flow_shift": 5.0},
    configs=CONFIGS["demo-1.5"],
    tasks=("t2v", "i2v"),
    form=FORM_15,
    resolutions={"demo": 128, **TARGET_SIZES},
)

#: Of 1.5, a checkpoint of no published size.
_CUSTOM_15 = replace(
    VARIANT_13B,
    name=CUSTOM,
    title="a checkpoint of no published size",
    num_frames=121,
    configs={},
    notes="",
    form=FORM_15,
)


def _variant(
    resolution: str,
    task: str,
    shift: float,
    kind: str = "",
    *,
    repo: str = "",
    guidance: float = 6.0,
    steps: int = 50,
    meanflow: bool = False,
) -> Variant:
    height, width = SIZES[resolution]
    words = {"t2v": "text to video", "i2v": "image to video"}[task]
    name = "-".join(filter(None, ("1.5", resolution, task, kind)))
    title = f"HunyuanVideo-1.5, {resolution}, {words}"
    return replace(
        _CUSTOM_15,
        name=name.replace("guidance", "cfg"),
        title=f"{title}, {kind.replace('-', ' ')}" if kind else title,
        repo_id=f"{_HUB}{repo or f'{resolution}_{task}'}",
        height=height,
        width=width,
        num_inference_steps=steps,
        guidance_scale=guidance,
        options={"flow_shift": shift},
        configs={
            **CONFIGS["1.5"],
            "transformer": {
                **CONFIGS["1.5"]["transformer"],
                "target_size": TARGET_SIZES[resolution],
                "task_type": task,
                "use_meanflow": meanflow,
            },
        },
        tasks=(task,),
        resolutions={resolution: TARGET_SIZES[resolution], **TARGET_SIZES},
    )


#: By size class and task, the shift of the noise levels that a checkpoint has.
_SHIFTS = {
    ("480p", "t2v"): 5.0,
    ("480p", "i2v"): 5.0,
    ("720p", "t2v"): 9.0,
    ("720p", "i2v"): 7.0,
}

VARIANTS_15 = (
    *(_variant(size, task, shift) for (size, task), shift in _SHIFTS.items()),
    *(
        _variant(
            size,
            task,
            shift,
            "guidance-distilled",
            repo=f"{size}_{task}_distilled",
            guidance=1.0,
        )
        for (size, task), shift in _SHIFTS.items()
    ),
    _variant(
        "480p",
        "i2v",
        7.0,
        "step-distilled",
        repo="480p_i2v_step_distilled",
        guidance=1.0,
        steps=12,
        meanflow=True,
    ),
)

VARIANTS = (DEMO, *VARIANTS_15, VARIANT_13B, DEMO_13B)


def _parse_number(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise UsageError(f"{value!r} is not a number") from None
    if not 0 < number < float("inf"):
        raise UsageError(f"{value!r} must be above 0 and finite")
    return number


OPTIONS = (
    Option(
        name="flow_shift",
        help="shift of the noise levels towards noise; the checkpoint's by default",
        parse=_parse_number,
    ),
    Option(
        name="true_cfg_scale",
        help="13b only: above 1, guide by a second prediction with the negative "
        "prompt, which it needs",
        parse=_parse_number,
    ),
)


def guided_13b(request: Request) -> bool:
    """Two predictions a step: upstream's ``true_cfg_scale`` and a negative prompt."""
    return float(request.options.get("true_cfg_scale", 1.0)) > 1


def bucket(target: int, aspect: tuple[float, float]) -> tuple[int, int]:
    """Upstream's (height, width) for a size class and an aspect (height, width).

    Raises:
        UsageError: a ratio beyond the most elongated bucket, 4 to 1.
    """
    from diffusers.pipelines.hunyuan_video1_5.image_processor import (
        HunyuanVideo15ImageProcessor,
    )

    height, width = aspect
    if not 1 / 4 <= height / width <= 4:
        raise UsageError(
            f"aspect ratio {width:g}:{height:g}: the buckets go from 1:4 to 4:1"
        )
    processor = HunyuanVideo15ImageProcessor(vae_scale_factor=_MULTIPLE)
    found = processor.calculate_default_height_width(height, width, target)
    return int(found[0]), int(found[1])


def _shift(checkpoint: Checkpoint, default: float) -> float:
    if not checkpoint.has("scheduler"):
        return default
    return float(checkpoint.config("scheduler").get("shift", default))


def guidance_default(checkpoint: Checkpoint) -> float | None:
    """The guidance scale of the checkpoint's guider; ``None`` without one."""
    if not (checkpoint.folder / "guider" / "guider_config.json").is_file():
        return None
    config = checkpoint.config("guider")
    return float(config.get("guidance_scale", 7.5))


def detect_15(checkpoint: Checkpoint) -> Variant:
    """The variant of a 1.5 checkpoint, by its transformer's config and its guider.

    One of no published size gets a variant of its own, with upstream's defaults.
    """
    config = checkpoint.config("transformer")
    guidance = guidance_default(checkpoint)
    shift = _shift(checkpoint, 5.0)
    for variant in VARIANTS_15:
        known = variant.configs["transformer"]
        if all(
            config.get(key, default) == known.get(key, default)
            for key, default in _TOLD_BY.items()
        ) and (guidance is None or guidance == variant.guidance_scale):
            options = {**variant.options, "flow_shift": shift}
            return replace(variant, options=options)
    target = int(config.get("target_size", 640))
    height, width = bucket(target, (9, 16))
    # Nothing is known of what it was trained for: both tasks where it has the parts.
    tasks = ("t2v", "i2v") if checkpoint.has("image_encoder") else ("t2v",)
    return replace(
        _CUSTOM_15,
        repo_id=checkpoint.source,
        height=height,
        width=width,
        guidance_scale=guidance if guidance is not None else 6.0,
        options={"flow_shift": shift},
        tasks=tasks,
        resolutions={f"{target}": target, **TARGET_SIZES},
    )


#: What tells the published 1.5 transformers apart, with upstream's defaults.
_TOLD_BY = {
    "num_layers": 54,
    "num_attention_heads": 16,
    "target_size": 640,
    "task_type": "i2v",
    "use_meanflow": False,
}


def detect_13b(checkpoint: Checkpoint) -> Variant:
    """The variant of a 13b checkpoint; another size of it has the same defaults."""
    config = checkpoint.config("transformer")
    known = VARIANT_13B.configs["transformer"]
    options = {**VARIANT_13B.options, "flow_shift": _shift(checkpoint, 7.0)}
    same = all(
        config.get(key, known[key]) == known[key]
        for key in ("num_layers", "num_single_layers", "num_attention_heads")
    )
    name = "13b" if same else CUSTOM
    return replace(VARIANT_13B, name=name, options=options)


def check_variant_15(request: Request, variant: Variant) -> None:
    """Refuse guidance or steps that break a distilled checkpoint.

    Raises:
        UsageError: they do.
    """
    if request.guidance_scale < 1:
        raise UsageError(
            f"guidance scale {request.guidance_scale:g} is below 1, which turns "
            "guidance off"
        )
    known = {v.name: v for v in VARIANTS_15}.get(variant.name)
    if known is not None and known.guidance_scale == 1:
        meanflow = bool(known.configs["transformer"]["use_meanflow"])
        _check_distilled(request, variant.name, meanflow)


def _check_distilled(request: Request, name: str, meanflow: bool) -> None:
    """Refuse what breaks a checkpoint with guidance, or steps as well, in it."""
    if request.guidance_scale != 1:
        raise UsageError(
            f"guidance scale {request.guidance_scale:g}: {name} has guidance "
            "distilled into it and takes no other than 1"
        )
    steps = request.num_inference_steps
    if meanflow and steps not in DISTILLED_STEPS:
        raise UsageError(
            f"{steps} steps: {name} is distilled to "
            f"{', '.join(map(str, DISTILLED_STEPS))} steps"
        )
    if not meanflow and steps != 50:
        raise UsageError(
            f"{steps} steps: {name} has guidance distilled into it at 50 steps and "
            "gives poor videos with others; leave --steps out"
        )


def check_15(request: Request, variant: Variant, checkpoint: Checkpoint) -> None:
    """Refuse what a 1.5 checkpoint cannot do.

    Raises:
        UsageError: guidance or steps that break a distilled checkpoint; image to video
            without an image encoder; an option of the other form.
        WeightsError: image to video without the image processor's config.
    """
    _check_common(request, checkpoint)
    if "true_cfg_scale" in request.options:
        raise UsageError(
            "option true_cfg_scale is for 13b; use the guidance scale for 1.5"
        )
    check_variant_15(request, variant)
    _check_guider(checkpoint)
    meanflow = bool(checkpoint.config("transformer").get("use_meanflow"))
    if meanflow or guidance_default(checkpoint) == 1:
        _check_distilled(request, variant.name, meanflow)
    if request.task == Task.IMAGE:
        if not checkpoint.has("image_encoder"):
            raise UsageError(
                f"{checkpoint.source} has no image_encoder; it makes videos from text "
                "only"
            )
        from tpuport.models.hunyuanvideo.inputs import FEATURE_EXTRACTOR

        checkpoint.require(FEATURE_EXTRACTOR)


def _check_guider(checkpoint: Checkpoint) -> None:
    """Refuse a guider that does more than the plain formula.

    Raises:
        UsageError: with what it does.
    """
    if guidance_default(checkpoint) is None:
        return
    config = checkpoint.config("guider")
    plain = {
        "_class_name": "ClassifierFreeGuidance",
        "guidance_rescale": 0.0,
        "use_original_formulation": False,
        "start": 0.0,
        "stop": 1.0,
        "enabled": True,
    }
    for name, value in plain.items():
        if config.get(name, value) != value:
            raise UsageError(
                f"{checkpoint.source}: the guider has {name} {config[name]!r}, which "
                f"is not ported; only {value!r} is"
            )


def check_13b(request: Request, variant: Variant, checkpoint: Checkpoint) -> None:
    """Refuse what a 13b checkpoint cannot do.

    Raises:
        UsageError: more steps than the schedule has; true guidance without a negative
            prompt.
        WeightsError: an autoencoder that compresses space by another ratio.
    """
    _check_common(request, checkpoint)
    checkpoint.expect("vae", "spatial_compression_ratio", 8)
    # Without prompts there are embeddings, negative ones included.
    lacking = any(request.prompts) and not all(request.negative_prompts)
    if guided_13b(request) and lacking:
        raise UsageError(
            f"true_cfg_scale={request.options['true_cfg_scale']:g} needs a negative "
            "prompt; upstream's pipeline ignores it without one"
        )


def _check_common(request: Request, checkpoint: Checkpoint) -> None:
    if not checkpoint.has("scheduler"):
        return
    train = int(checkpoint.config("scheduler").get("num_train_timesteps", 1000))
    if request.num_inference_steps > train:
        raise UsageError(
            f"{request.num_inference_steps} denoising steps asked for; the schedule "
            f"has {train}"
        )
    from tpuport.models.hunyuanvideo.scheduler import request_schedule

    request_schedule(request, checkpoint)
