"""What a user asks for, after defaults and checks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from tpuport.core.enums import Task
from tpuport.core.files.sealed_json import as_json
from tpuport.core.files.typed import checked, recorded_in
from tpuport.core.spec import kinds
from tpuport.core.spec.step_cache import StepCache
from tpuport.errors import ArtifactError, UsageError, quoted

if TYPE_CHECKING:
    from tpuport.core.files.stage_tensors import TensorSpec
    from tpuport.core.spec.variant import Variant

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
        task: what the videos are made from.
        sources: sha256 of the pixels of the image or video of each video; empty for
            text to video.
        strength: share of the steps that video to video runs, from its noisy end.
        step_cache: which steps reuse work; ``None`` for none.
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
    task: Task = Task.TEXT
    sources: tuple[str, ...] = ()
    strength: float | None = None
    step_cache: StepCache | None = None

    def __post_init__(self) -> None:
        for name in ("height", "width", "num_frames", "num_inference_steps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UsageError(f"{name} {quoted(value)} is not a whole number")
        for name in ("fps", "guidance_scale"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name} {quoted(value)} is not a number")
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
        if not 1e-6 <= self.fps <= 1000:
            raise UsageError(f"fps {self.fps} must be from 0.000001 to 1000")
        if self.task not in list(Task):
            raise UsageError(f"task {self.task!r}: choose one of {', '.join(Task)}")
        if bool(self.sources) != (self.task != Task.TEXT):
            raise UsageError(f"{len(self.sources)} sources for task {self.task}")
        if self.sources and len(self.sources) != len(self.prompts):
            raise UsageError(
                f"{len(self.sources)} images or videos for {len(self.prompts)} "
                "prompts; give one, or one for each"
            )
        self._check_strength()
        if not abs(self.guidance_scale) < float("inf"):
            raise UsageError(f"guidance scale {self.guidance_scale} is not finite")

    def _check_strength(self) -> None:
        if self.strength is None:
            if self.task == Task.VIDEO:
                raise UsageError("video to video needs a strength in (0, 1]")
            return
        if isinstance(self.strength, bool) or not isinstance(
            self.strength, int | float
        ):
            raise UsageError(f"strength {quoted(self.strength)} is not a number")
        if self.task != Task.VIDEO:
            raise UsageError(
                f"strength {self.strength} was given without a video; it is for video "
                "to video only"
            )
        if not 0 < self.strength <= 1:
            raise UsageError(
                f"strength {self.strength} must be above 0 and at most 1: the share of "
                "the steps that are run"
            )

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
        data = {**asdict(self), "step_cache": str(self.step_cache or "none")}
        return cast(dict[str, Any], as_json(data, "a request"))

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], file: object, field: str = "settings"
    ) -> Request:
        """The inverse of :meth:`as_dict`.

        Args:
            data: as read from JSON.
            file: what it was read from, for messages.
            field: of the file, which ``data`` is.

        Raises:
            ArtifactError: an entry is missing, unknown, of another type or off its
                rule.
        """
        remedy = "use the file as `tpuport` wrote it, or start over in a new folder"
        if missing := sorted(set(cls.__dataclass_fields__) - set(data)):
            raise ArtifactError(
                f"{file}: has no usable {field}.{missing[0]} (it is missing); {remedy}"
            )
        checked(str, data["step_cache"], file, remedy, at=f"{field}.step_cache")
        plain = {**data, "step_cache": None}
        request = checked(cls, plain, file, remedy, at=field)
        with recorded_in(file, f"{field}.step_cache", remedy):
            cache = kinds.step_cache(data["step_cache"])
        return replace(request, step_cache=cache)


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
    sides = {name: getattr(request, name) for name in ("height", "width")}
    wrong = {n: side for n, side in sides.items() if not variant.sizes.allows(side)}
    if wrong:
        asked = " and ".join(f"{name} {side}" for name, side in wrong.items())
        choices = [variant.sizes.nearest(side) for side in wrong.values()]
        nearest = " and ".join(" or ".join(map(str, sides)) for sides in choices)
        raise UsageError(
            f"{asked} asked for; {variant.name} needs a multiple of "
            f"{variant.sizes.multiple}; nearest valid: {nearest}"
        )


def check_task(task: Task, variant: Variant, others: Sequence[Variant]) -> None:
    """Refuse a task that a variant cannot do; the message names variants that can.

    Raises:
        UsageError: it cannot.
    """
    if task in variant.tasks:
        return
    need = {
        Task.TEXT: "text alone",
        Task.IMAGE: "an image (--image)",
        Task.VIDEO: "a video (--video)",
    }
    can = " or ".join(need[Task(known)] for known in variant.tasks)
    able = [v.name for v in others if task in v.tasks]
    other = f"; {', '.join(able)} can" if able else "; no variant of this model can"
    raise UsageError(
        f"variant {variant.name} makes videos from {can}, not from {need[task]}{other}"
    )


def denoising_steps(request: Request) -> int:
    """How many steps are run: video to video skips the noisiest ones.

    Source: ``get_timesteps`` of diffusers' video-to-video pipelines.
    """
    steps = request.num_inference_steps
    if request.strength is None:
        return steps
    return min(int(steps * request.strength), steps)


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
        raise UsageError(f"{name} {quoted(value)} is not a string or a list of strings")
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
        raise UsageError(
            f"seed {quoted(seed)} is not a whole number or a list"
        ) from None
    if one:
        return (seeds,) * batches
    if len(seeds) != count:
        raise UsageError(f"{len(seeds)} seeds for {count} videos; give one, or {count}")
    return tuple(seeds[i * batch_size : (i + 1) * batch_size] for i in range(batches))


def check_given(
    specs: Sequence[TensorSpec],
    prompt: Any,
    negative: Any,
    given: Mapping[str, Any],
) -> dict[str, Any]:
    """The embeddings given in place of prompts; the exclusions are upstream's.

    Args:
        specs: of the tensors that the encode stage writes; ``given`` has some of them.

    Raises:
        UsageError: an incomplete set, prompts and their embeddings together, or shapes
            that do not fit together.
    """
    found = {name: value for name, value in given.items() if value is not None}
    for role, text, argument in (
        ("prompt", prompt, "prompt"),
        ("negative", negative, "negative_prompt"),
    ):
        names = [spec.name for spec in specs if spec.role == role]
        have = [name for name in names if name in found]
        if have and text is not None:
            raise UsageError(f"{argument} and {have[0]} exclude each other; give one")
        if have and len(have) < len(names):
            lacking = ", ".join(name for name in names if name not in found)
            raise UsageError(f"{have[0]} was given without {lacking}; give all of them")
        if role == "prompt" and not have:
            if text is None:
                instead = f", or {names[0]} in its place" if names else ""
                raise UsageError(f"give a prompt{instead}")
            if found:
                raise UsageError(f"{next(iter(found))} goes with {names[0]} only")
            return {}
    sizes: dict[int | str, tuple[int, str]] = {}
    for spec in specs:
        if spec.name not in found:
            continue
        shape = tuple(found[spec.name].shape)
        if len(shape) != len(spec.shape):
            raise UsageError(
                f"{spec.name} of shape {shape} was given; expected "
                f"[{', '.join(map(str, spec.shape))}]"
            )
        for name, size in zip(spec.shape, shape, strict=True):
            agreed, first = sizes.setdefault(name, (size, spec.name))
            if agreed != size:
                raise UsageError(
                    f"{spec.name} {shape} and {first} must agree in {name}: "
                    f"{size} and {agreed}"
                )
    return found
