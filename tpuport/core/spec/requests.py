"""From what a user asks for to a checked request, for one checkpoint on one mesh."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tpuport.core.enums import Task
from tpuport.core.files.sources import Source, read_image, read_video
from tpuport.core.files.typed import recorded_in
from tpuport.core.mesh.device_memory import host_memory
from tpuport.core.reports import Reporter
from tpuport.core.spec import kinds, rules
from tpuport.core.spec.request import Request, one_per_video, seeds_by_batch
from tpuport.core.spec.rules import Known, check_options, check_size
from tpuport.core.spec.run_settings import Asked
from tpuport.core.spec.variant import CUSTOM
from tpuport.errors import UsageError

if TYPE_CHECKING:
    import torch

    from tpuport.core.mesh.device_mesh import PlacedMesh
    from tpuport.core.spec.model_port import ModelPort
    from tpuport.core.spec.variant import Variant
    from tpuport.core.weights.checkpoint import Checkpoint


class Requests:
    """Makes and checks requests.

    Args:
        port, variant: the form of the model, and the defaults and rules in force.
        checkpoint, mesh: where they are not known yet, requests are only made.
        reporter: told what has no effect.
        here: whether the requests will run on this machine.
    """

    def __init__(
        self,
        port: ModelPort,
        variant: Variant,
        checkpoint: Checkpoint | None = None,
        mesh: PlacedMesh | None = None,
        reporter: Reporter | None = None,
        *,
        here: bool = False,
    ) -> None:
        self.port = port
        self.variant = variant
        self.checkpoint = checkpoint
        self.mesh = mesh
        self.reporter = reporter or Reporter()
        self.here = here

    def request(
        self,
        *,
        source: Source | None = None,
        videos: int | None = None,
        batched: bool = True,
        **given: Any,
    ) -> Request:
        """A checked request, with the variant's defaults filled in.

        Args:
            source: the image or the video to start from.
            videos: how many, when embeddings are given instead of prompts.
            batched: several prompts as one batch (as one call of the upstream pipeline
                does), or one after the other, each as if it were alone.
            given: the fields of :class:`~tpuport.core.spec.run_settings.Asked`, as
                :meth:`Session.generate` takes them; ``None`` is not given.

        Raises:
            UsageError: a value is off its rule; the message names the nearest legal
                ones.
            MeshError: the mesh does not divide the batch.
            TypeError: a keyword that there is not.
        """
        variant = self.variant
        asked = Asked(**{n: value for n, value in given.items() if value is not None})
        prompts = one_per_video(given.get("prompt"), videos or 1, "prompt")
        count = len(prompts)
        batch_size = count if batched else 1
        task = source.task if source else Task.TEXT
        height, width = self._size(asked, source)
        strength = asked.strength
        if task == Task.VIDEO and strength is None:
            strength = variant.strength
        request = Request(
            prompts=prompts,
            negative_prompts=one_per_video(
                given.get("negative_prompt"), count, "negative_prompt"
            ),
            seeds=seeds_by_batch(_given(given.get("seed"), 0), count, batch_size),
            batch_size=batch_size,
            height=height,
            width=width,
            **rules.with_defaults(asked, variant, *rules.SAMPLING),
            options=self.options(asked.options),
            task=task,
            sources=source.digests_for(count) if source else (),
            strength=strength,
            step_cache=kinds.step_cache(asked.step_cache),
        )
        self.check(request)
        if any(request.negative_prompts) and not self.port.guided(request):
            self.reporter.say(
                "warning: the negative prompt has no effect, since guidance is off"
            )
        return request

    def _size(self, asked: Asked, source: Source | None) -> tuple[int, int]:
        """The size asked for, the one of a bucket, or the variant's."""
        variant, bucket = self.variant, self.port.bucket
        height, width = asked.height, asked.width
        aspect = kinds.aspect_ratio(asked.aspect_ratio)
        if asked.resolution is None and aspect is None:
            fitted = bucket and variant.resolutions and height is None and width is None
            if source is None or not fitted:
                return _given(height, variant.height), _given(width, variant.width)
        check_size(asked)
        name = asked.resolution or next(iter(variant.resolutions), None)
        if bucket is None or name is None or name not in variant.resolutions:
            known = "no size classes; use --size"
            if variant.resolutions:
                known = f"the size classes {', '.join(variant.resolutions)}"
            what = "aspect_ratio" if name is None else f"resolution {name!r}"
            raise UsageError(f"{what}: variant {variant.name} has {known}")
        if aspect is None:
            aspect = source.size if source else self.port.aspect
        return bucket(variant.resolutions[name], aspect)

    def options(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The model's options with the variant's defaults.

        Raises:
            UsageError: the model has no such option, or the option no such value.
        """
        given = check_options(self.port, asked, ", beside the arguments of generate")
        return {**self.variant.options, **given}

    def check(self, request: Request, latents: torch.Tensor | None = None) -> None:
        """Refuse a request that this checkpoint or mesh cannot do.

        Args:
            latents: initial noise that was given.

        Raises:
            UsageError, MeshError: see :meth:`request`.
        """
        rules.check(
            Known(
                port=self.port,
                variant=self.variant,
                request=request,
                checkpoint=self.checkpoint,
                devices=self.mesh.spec if self.mesh is not None else None,
                latents=latents,
                room=host_memory(total=True) if self.here else None,
            )
        )


def recorded_request(
    port: ModelPort,
    data: Mapping[str, Any],
    file: object,
    field: str = "settings",
) -> Request:
    """The request that a file records, with options that the model has.

    Args:
        port: the model; any of its forms.
        data, file, field: as :meth:`Request.from_dict` takes them.

    Raises:
        ArtifactError: the request is not usable.
    """
    request = Request.from_dict(data, file, field)
    always = set.intersection(*(set(v.options) for v in port.variants))
    for name in sorted(always | set(request.options)):
        where, remedy = f"{field}.options.{name}", "use the file as `tpuport` wrote it"
        with recorded_in(file, where, remedy):
            if name in always and request.options.get(name) is None:
                raise UsageError("it is missing")
            check_options(port, {name: request.options[name]})
    return request


def recorded_variant(port: ModelPort, name: str, file: object) -> str | None:
    """The variant that a file records; ``None`` for a checkpoint of no published size.

    Raises:
        ArtifactError: the model has no such variant.
    """
    if name == CUSTOM:
        return None
    with recorded_in(file, "variant", "use the file as `tpuport` wrote it"):
        return port.variant(name).name


def read_source(image: Any, video: Any, frames: int) -> Source | None:
    """What a run starts from: an image, or as many frames of a video as will be made.

    Raises:
        UsageError: both were given; or one cannot be read, is too small, or too short.
    """
    if image is not None and video is not None:
        raise UsageError("image and video exclude each other; give one")
    if image is not None:
        return read_image(image)
    return None if video is None else read_video(video, frames).first(frames)


def _given(value: Any, default: Any) -> Any:
    return default if value is None else value
