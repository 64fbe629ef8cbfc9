"""What a user asks for, after defaults and checks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tpuport.errors import UsageError

if TYPE_CHECKING:
    from tpuport.core.spec import Variant

#: Seeds are what ``torch.Generator.manual_seed`` takes without wrapping.
MAX_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One run: some videos of one shape.

    Videos are made ``batch_size`` at a time. A batch with one seed draws its noise from
    one generator, a batch with as many seeds as videos from one generator a video: both
    as the diffusers pipeline does.

    Attributes:
        prompts: one per video; empty strings where embeddings were given instead.
        negative_prompts: one per video.
        seeds: per batch, one seed or one seed per video.
        batch_size: videos denoised together; divides the number of prompts.
        height, width: of the video, in pixels.
        num_frames: of the video.
        fps: frames per second of the written file; the model does not see it.
        num_inference_steps: denoising steps.
        guidance_scale: classifier-free guidance; at most 1 turns it off.
        options: settings that only this model has.
    """

    prompts: tuple[str, ...]
    negative_prompts: tuple[str, ...]
    seeds: tuple[tuple[int, ...], ...]
    batch_size: int
    height: int
    width: int
    num_frames: int
    fps: float
    num_inference_steps: int
    guidance_scale: float
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("height", "width", "num_frames", "num_inference_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"{name} {value!r} is not a whole number")
        for name in ("fps", "guidance_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name} {value!r} is not a number")
        if not self.prompts:
            raise UsageError("no prompt was given")
        if len(self.negative_prompts) != len(self.prompts):
            raise UsageError(
                f"{len(self.negative_prompts)} negative prompts for "
                f"{len(self.prompts)} prompts; give one, or one for each"
            )
        if self.batch_size < 1 or len(self.prompts) % self.batch_size:
            raise UsageError(
                f"batch size {self.batch_size} does not divide {len(self.prompts)} "
                "videos"
            )
        if len(self.seeds) != self.batches:
            raise UsageError(f"{len(self.seeds)} seeds for {self.batches} batches")
        for seeds in self.seeds:
            if len(seeds) not in (1, self.batch_size):
                raise UsageError(
                    f"{len(seeds)} seeds for a batch of {self.batch_size}; give one, "
                    "or one for each video"
                )
            for seed in seeds:
                if not 0 <= seed <= MAX_SEED:
                    raise UsageError(f"seed {seed} is not in 0 .. {MAX_SEED}")
        if self.num_inference_steps < 1:
            raise UsageError(
                f"{self.num_inference_steps} denoising steps asked for; at least 1 is "
                "needed"
            )
        for name in ("height", "width", "num_frames"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} {getattr(self, name)} must be positive")
        if not 0 < self.fps <= 1000:
            raise UsageError(f"fps {self.fps} must be above 0 and at most 1000")
        if not abs(self.guidance_scale) < float("inf"):
            raise UsageError(f"guidance scale {self.guidance_scale} is not finite")

    @property
    def batches(self) -> int:
        """How many times each stage runs."""
        return len(self.prompts) // self.batch_size

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance is on; the rule is upstream's."""
        return self.guidance_scale > 1.0

    def slice(self, batch: int) -> slice:
        """The videos of a batch, as a slice of the leading dim."""
        return slice(batch * self.batch_size, (batch + 1) * self.batch_size)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        data = asdict(self)
        data["options"] = dict(self.options)
        data["prompts"] = list(self.prompts)
        data["negative_prompts"] = list(self.negative_prompts)
        data["seeds"] = [list(seeds) for seeds in self.seeds]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Request:
        """The inverse of :meth:`as_dict`.

        Raises:
            UsageError: an entry is missing, unknown or off its rule.
        """
        known = set(cls.__dataclass_fields__)
        unknown = sorted(set(data) - known)
        missing = sorted(known - set(data) - {"options"})
        if unknown or missing:
            raise UsageError(
                f"settings do not fit this version of tpuport: unknown {unknown}, "
                f"missing {missing}"
            )
        values = dict(data)
        values["prompts"] = tuple(data["prompts"])
        values["negative_prompts"] = tuple(data["negative_prompts"])
        values["seeds"] = tuple(tuple(seeds) for seeds in data["seeds"])
        return cls(**values)


def check_shape(request: Request, variant: Variant) -> None:
    """Refuse frame counts and sizes off the variant's rules.

    Raises:
        UsageError: with the nearest legal values.
    """
    frames = variant.frames
    if not frames.allows(request.num_frames):
        upto = f", up to {frames.limit}" if frames.limit else ""
        nearest = " or ".join(map(str, frames.nearest(request.num_frames)))
        raise UsageError(
            f"{request.num_frames} frames asked for; {variant.name} makes "
            f"{frames.step}n+1 frames{upto}; nearest valid: {nearest}"
        )
    for name in ("height", "width"):
        asked = getattr(request, name)
        if not variant.sizes.allows(asked):
            nearest = " or ".join(map(str, variant.sizes.nearest(asked)))
            raise UsageError(
                f"{name} {asked} asked for; {variant.name} needs a multiple of "
                f"{variant.sizes.multiple}; nearest valid: {nearest}"
            )


def one_per_video(
    value: str | Sequence[str] | None, count: int, name: str
) -> tuple[str, ...]:
    """One text per video.

    Raises:
        UsageError: not a text or a list of texts, or an empty list.
    """
    if value is None:
        return ("",) * count
    if isinstance(value, str):
        return (value,) * count
    if not isinstance(value, Sequence) or not all(isinstance(t, str) for t in value):
        raise UsageError(f"{name} {value!r} is not a string or a list of strings")
    if not value:
        raise UsageError(f"{name} is an empty list; give at least one")
    return tuple(value)


def seeds_by_batch(
    seed: int | Sequence[int], count: int, batch_size: int
) -> tuple[tuple[int, ...], ...]:
    """Seeds by batch.

    Raises:
        UsageError: not whole numbers, or not one or ``count`` of them.
    """
    batches = count // batch_size
    one = hasattr(seed, "__index__")
    given: Any = [seed] if one else seed
    try:
        seeds = tuple(operator.index(s) for s in given)
    except TypeError:
        raise UsageError(f"seed {seed!r} is not a whole number or a list") from None
    if one:
        return (seeds,) * batches
    if len(seeds) != count:
        raise UsageError(f"{len(seeds)} seeds for {count} videos; give one, or {count}")
    return tuple(seeds[i * batch_size : (i + 1) * batch_size] for i in range(batches))


def check_embeds(
    prompt: Any, negative: Any, embeds: Any, negative_embeds: Any
) -> dict[str, Any]:
    """The given embeddings by name; the exclusions are the upstream pipeline's."""
    if embeds is None:
        if prompt is None:
            raise UsageError("give a prompt, or prompt_embeds in its place")
        if negative_embeds is not None:
            raise UsageError("negative_prompt_embeds go with prompt_embeds only")
        return {}
    if prompt is not None:
        raise UsageError("prompt and prompt_embeds exclude each other; give one")
    if negative is not None and negative_embeds is not None:
        raise UsageError(
            "negative_prompt and negative_prompt_embeds exclude each other; give one"
        )
    named = {"prompt_embeds": embeds}
    if negative_embeds is not None:
        if tuple(negative_embeds.shape) != tuple(embeds.shape):
            raise UsageError(
                f"negative_prompt_embeds {tuple(negative_embeds.shape)} and "
                f"prompt_embeds {tuple(embeds.shape)} must have one shape"
            )
        named["negative_prompt_embeds"] = negative_embeds
    return named
