"""From what a user asks for to a checked request, for one checkpoint on one mesh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tpuport.core.files.sources import (
    Source,
    parse_aspect_ratio,
    read_image,
    read_video,
)
from tpuport.core.spec.request import (
    Request,
    check_shape,
    check_task,
    denoising_steps,
    one_per_video,
    seeds_by_batch,
)
from tpuport.core.spec.step_cache import StepCache
from tpuport.errors import MeshError, UsageError

if TYPE_CHECKING:
    import jax
    import torch

    from tpuport.core.reports import Reporter
    from tpuport.core.spec.model_port import ModelPort
    from tpuport.core.spec.variant import Variant
    from tpuport.core.weights.checkpoint import Checkpoint


class RequestBuilder:
    """The part of a session that makes and checks requests.

    Attributes:
        port: the model.
        variant: the defaults and rules in force.
        checkpoint: the weights.
        mesh: the devices.
        reporter: told what has no effect.
    """

    port: ModelPort
    variant: Variant
    checkpoint: Checkpoint
    mesh: jax.sharding.Mesh
    reporter: Reporter

    def request(
        self,
        *,
        prompt: str | Sequence[str] | None = None,
        negative_prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_frames: int | None = None,
        fps: float | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        seed: int | Sequence[int] = 0,
        options: Mapping[str, Any] | None = None,
        source: Source | None = None,
        strength: float | None = None,
        resolution: str | None = None,
        aspect_ratio: str | None = None,
        step_cache: str | None = None,
        videos: int | None = None,
        batched: bool = True,
        checked: bool = True,
    ) -> Request:
        """A checked request, with the variant's defaults filled in.

        Args:
            prompt: one or several; with ``batched`` they are denoised together.
            source: the image or the video to start from.
            resolution, aspect_ratio: see :meth:`generate`; in place of height and
                width.
            videos: how many, when embeddings are given instead of prompts.
            batched: several prompts as one batch (as one call of the upstream pipeline
                does), or one after the other, each as if it were alone.
            checked: without it the request is only made; no checkpoint or mesh is
                looked at.

        Raises:
            UsageError: a value is off its rule; the message names the nearest legal
                ones.
            MeshError: the mesh does not divide the batch.
        """
        variant = self.variant
        prompts = one_per_video(prompt, videos or 1, "prompt")
        count = len(prompts)
        batch_size = count if batched else 1
        task = source.task if source else "t2v"
        height, width = self._size(height, width, resolution, aspect_ratio, source)
        if task == "v2v" and strength is None:
            strength = variant.strength
        request = Request(
            prompts=prompts,
            negative_prompts=one_per_video(negative_prompt, count, "negative_prompt"),
            seeds=seeds_by_batch(seed, count, batch_size),
            batch_size=batch_size,
            height=height,
            width=width,
            num_frames=_given(num_frames, variant.num_frames),
            fps=_given(fps, variant.fps),
            num_inference_steps=_given(
                num_inference_steps, variant.num_inference_steps
            ),
            guidance_scale=_given(guidance_scale, variant.guidance_scale),
            options=self._options(options or {}),
            task=task,
            sources=source.digests_for(count) if source else (),
            strength=strength,
            step_cache=str(StepCache.parse(step_cache) or "none"),
        )
        if not checked:
            return request
        self.check(request)
        if any(request.negative_prompts) and not self.port.guided(request):
            self.reporter.say(
                "warning: the negative prompt has no effect, since guidance is off"
            )
        return request

    def _size(
        self,
        height: int | None,
        width: int | None,
        resolution: str | None,
        aspect_ratio: str | None,
        source: Source | None,
    ) -> tuple[int, int]:
        """The size asked for, the one of a bucket, or the variant's."""
        variant, bucket = self.variant, self.port.bucket
        if resolution is None and aspect_ratio is None:
            fitted = bucket and variant.resolutions and height is None and width is None
            if source is None or not fitted:
                return _given(height, variant.height), _given(width, variant.width)
        elif height is not None or width is not None:
            raise UsageError(
                "resolution and aspect_ratio exclude height, width and size; give one "
                "or the other"
            )
        if bucket is None or not variant.resolutions:
            raise UsageError(
                f"{variant.name} has no size classes; give a size in place of "
                "resolution and aspect_ratio"
            )
        name = _given(resolution, next(iter(variant.resolutions)))
        if name not in variant.resolutions:
            raise UsageError(
                f"resolution {name!r}: variant {variant.name} has the size classes "
                + ", ".join(variant.resolutions)
            )
        if aspect_ratio is not None:
            aspect: tuple[float, float] = parse_aspect_ratio(aspect_ratio)
        else:
            aspect = source.size if source else self.port.aspect
        return bucket(variant.resolutions[name], aspect)

    def _options(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        known = {option.name: option for option in self.port.options}
        values = dict(self.variant.options)
        for name, value in asked.items():
            if name not in known:
                raise UsageError(
                    f"model {self.port.name!r} has no option {name!r}; it has "
                    + (", ".join(known) or "none")
                    + ", beside the arguments of generate"
                )
            if value is None:
                continue
            parsed = known[name].parse(value)
            choices = known[name].choices
            if choices and parsed not in choices:
                raise UsageError(
                    f"option {name}={value!r}: choose one of {', '.join(choices)}"
                )
            values[name] = parsed
        return values

    def check(self, request: Request) -> None:
        """Refuse a request that this checkpoint or mesh cannot do.

        Raises:
            UsageError, MeshError: see :meth:`request`.
        """
        check_shape(request, self.variant)
        check_task(request.task, self.variant, self.port.variants)
        cache = StepCache.parse(request.step_cache)
        if cache is not None:
            if not any(c.split for c in self.port.components.values()):
                raise UsageError(
                    f"model {self.port.name!r} declares no point at which its forward "
                    "can be cut; leave the step cache out"
                )
            cache.resolve(denoising_steps(request))
        self.port.check(request, self.variant, self.checkpoint)
        dp = self.mesh.shape["dp"]
        for stage in self.port.stages:
            rows = stage.batch_rows(request) if stage.batch_rows else 0
            if rows and rows % dp:
                legal = [n for n in range(1, rows + 1) if rows % n == 0]
                why = "with" if self.port.guided(request) else "without"
                raise MeshError(
                    f"mesh dp={dp} does not divide the batch of {stage.name}: "
                    f"{rows} rows for {request.batch_size} video(s) {why} guidance; "
                    f"legal dp values: {', '.join(map(str, legal))}"
                )

    def check_latents(self, request: Request, latents: torch.Tensor) -> None:
        """Refuse initial latents of another shape than the request's.

        Raises:
            UsageError: the message has both shapes; or the run starts from a video.
        """
        if request.task == "v2v":
            raise UsageError(
                "latents and a video exclude each other: a run from a video starts "
                "from the video's own"
            )
        shape = self.port.latent_shape(request, self.checkpoint)
        expected = (len(request.prompts), *shape[1:])
        if tuple(latents.shape) != expected:
            raise UsageError(
                f"latents of shape {tuple(latents.shape)} were given; this request "
                f"needs {expected}{self._latent_dims()}"
            )

    def _latent_dims(self) -> str:
        """What the dims of initial latents are, for messages."""
        specs = self.port.stages[0].writes
        dims = [s.shape for s in specs if s.name == "initial_latents"]
        return f" ({', '.join(map(str, dims[0]))})" if dims else ""

    def _check_backend(self, request: Request, backend: str) -> None:
        if backend == "diffusers" and request.step_cache != "none":
            raise UsageError(
                f"step cache {request.step_cache} is not upstream's; leave it out, or "
                "use the backend tpuport"
            )

    def _requested(
        self, image: Any, video: Any, num_frames: int | None, **asked: Any
    ) -> tuple[Request, dict[str, torch.Tensor]]:
        """The request, and the pixels that its encode stage reads."""
        source: Source | None = None
        if image is not None and video is not None:
            raise UsageError("image and video exclude each other; give one")
        frames = _given(num_frames, self.variant.num_frames)
        if image is not None:
            source = read_image(image)
        elif video is not None:
            source = read_video(video, frames).first(frames)
        request = self.request(num_frames=num_frames, source=source, **asked)
        if source is None:
            return request, {}
        return request, {source.kind: source.for_videos(len(request.prompts))}


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
