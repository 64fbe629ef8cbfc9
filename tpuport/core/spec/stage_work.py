"""What a stage is asked for, and the work that it plans: data, no devices.

Importing this module imports neither torch nor jax.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tpuport.core.enums import Dtype, Pixels, Tiling
from tpuport.core.spec.request import Request
from tpuport.errors import VideoError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from tpuport.core.weights.checkpoint import Checkpoint

Tree = Any
"""A nested tuple, list or dict of arrays; ``None`` leaves are allowed."""


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a program within a stage.

    Attributes:
        program: its name in the stage.
        inputs: of this call alone.
        fresh: start from ``Work.carry`` again, in place of the carry of the call
            before.
    """

    program: str
    inputs: Tree
    fresh: bool = False


@dataclass(kw_only=True, slots=True)
class Work:
    """What a stage does for one batch: calls in order, a carry handed along.

    Attributes:
        carry: the initial carry; also of later calls that are ``fresh``.
        constants: inputs that are the same for every call; never compiled in.
        calls: made lazily, so that per-call inputs need not exist all at once.
        total: how many calls there are.
        finish: the tensors the stage writes, from the last carry and all outputs; a
            stage that gives frames may write none.
        watch: called with (index, output) of each call as it completes; may raise.
        programs: programs to compile before the first call, all for the shapes of its
            inputs; for a stage that changes programs on the way.
        to_host: fetch each output as its call completes, so that the device does not
            hold them all; ``finish`` gets NumPy arrays.
        to_frames: of a stage that makes videos: ``to_frames(index, output)`` gives the
            frames that call ``index`` completes, or ``None``. Each output is fetched as
            its call completes, given to this function as NumPy arrays, and let go;
            ``finish`` gets no outputs. Frames are an array [B, F, Y, X, 3] in the order
            of the video. An output of
            :func:`tpuport.core.files.frames.encode_pixels` tells the statistics of what
            :func:`tpuport.core.files.frames.as_frames` makes of it,
            and a mapping with ``frames`` tells its own. Otherwise the host takes the
            statistics of float frames.
    """

    carry: Tree
    constants: Tree
    calls: Iterable[Call]
    total: int
    finish: Callable[[Tree, list[Tree]], dict[str, Any]] = lambda carry, outputs: {}
    watch: Callable[[int, Tree], None] | None = None
    programs: tuple[str, ...] = ()
    to_host: bool = False
    to_frames: (
        Callable[[int, Tree], np.ndarray | Mapping[str, np.ndarray] | None] | None
    ) = None

    def __post_init__(self) -> None:
        """Frames are made of outputs on the host."""
        self.to_host = self.to_host or self.to_frames is not None


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """What a stage's functions may look at. ``batch`` counts batches of the request.

    Attributes:
        checkpoint: files and configs; weights are not read through it.
        request: the whole run.
        batch: which batch of the run.
        inputs: the tensors read, already cut to this batch.
        dtype: of the weights.
        module: the skeleton module of a component, for upstream helpers on it; its
            parameters hold no data.
        device: where plain upstream code should run.
        say: tells people something.
        pixels: what programs of decode should give: ``"float32"`` in [0, 1], or
            ``"uint8"``.
        vae_tiling: whether decode runs in tiles: ``"on"`` or ``"off"``; ``"auto"``
            where the stage has no ``tiles``.
        upstream: ``upstream(name, load)`` is a component as upstream's own object:
            ``load()``, or what it returned before when weights are kept loaded.
        planned: only shapes and dtypes count, so that numbers need not be drawn.
    """

    checkpoint: Checkpoint
    request: Request
    batch: int
    inputs: Mapping[str, torch.Tensor]
    dtype: str
    module: Callable[[str], torch.nn.Module]
    device: str = "cpu"
    say: Callable[[str], None] = lambda text: None
    pixels: Pixels = Pixels.FLOAT32
    vae_tiling: Tiling = Tiling.AUTO
    upstream: Callable[[str, Callable[[], Any]], Any] = lambda name, load: load()
    planned: bool = False

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompts of this batch."""
        return self.request.prompts[self.request.slice(self.batch)]

    @property
    def negative_prompts(self) -> tuple[str, ...]:
        """The negative prompts of this batch."""
        return self.request.negative_prompts[self.request.slice(self.batch)]

    def generators(self) -> list[torch.Generator]:
        """Fresh CPU generators of this batch's seeds: one, or one per video."""
        import torch

        return [
            torch.Generator().manual_seed(seed)
            for seed in self.request.seeds[self.batch]
        ]

    def noise(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        generators: list[torch.Generator] | None = None,
    ) -> torch.Tensor:
        """Noise of a batch as upstream's pipelines draw it; zeros for a plan.

        Args:
            shape: of all videos.
            dtype: in which it is drawn: a generator gives other numbers in bfloat16.
            generators: move on with each draw; fresh generators of the seeds when not
                given.
        """
        import torch
        from diffusers.utils.torch_utils import randn_tensor

        if self.planned:
            return torch.zeros(shape, dtype=dtype)
        drawn = one_or_all(generators or self.generators())
        noise: torch.Tensor = randn_tensor(shape, generator=drawn, dtype=dtype)
        return noise

    def upstream_component(self, name: str, dtype: str | None = None) -> Any:
        """A component as upstream's own object, on ``device``, by its own loader.

        Args:
            name: its folder in the checkpoint.
            dtype: in place of the run's dtype.
        """
        from tpuport.core.arrays import torch_dtype

        def load() -> Any:
            upstream: Any = type(self.module(name))
            # transformers and diffusers call the argument by different names.
            own = upstream.__module__.startswith("transformers.")
            given = {
                "dtype" if own else "torch_dtype": torch_dtype(dtype or self.dtype)
            }
            folder = self.checkpoint.folder / name
            made = upstream.from_pretrained(folder, **given)
            files = self.checkpoint.weight_files(name)
            for weight, tensor in made.state_dict().items():
                file = files.get(weight, folder / "config.json")
                self.checkpoint.check_finite(file, weight, tensor)
            return made.eval().to(self.device)

        return self.upstream(name, load)


def one_or_all(
    generators: list[torch.Generator],
) -> torch.Generator | list[torch.Generator]:
    """Generators as upstream's pipelines take them: a single one is no list."""
    return generators if len(generators) > 1 else generators[0]


#: Characters of the lost part of a prompt that a warning shows.
SHOWN = 200


def tell_lost(
    say: Callable[[str], None], found: int, limit: int, lost: str, reader: str = ""
) -> None:
    """Warn of the end of a prompt that an encoder does not see.

    Args:
        found: tokens of the prompt.
        limit: how many are read.
        lost: the part beyond them.
        reader: whose limit that is, with a blank before it.
    """
    shown = lost if len(lost) <= SHOWN else lost[:SHOWN] + "…"
    say(
        f"warning: a prompt is {found} tokens long, over the limit of {limit}{reader}; "
        f"this part was cut off: {shown!r}"
    )


def finite_or_error(steps: int, dtype: str) -> Callable[[int, Mapping[str, Any]], None]:
    """What watches steps whose outputs say whether their latents are ``finite``.

    Args:
        dtype: of the weights.

    Raises:
        VideoError: a step left them infinite or NaN.
    """

    def watch(index: int, output: Mapping[str, Any]) -> None:
        if not bool(output["finite"]):
            when = f" after step {index + 1} of {steps}"
            raise not_finite("denoise", "latents", when, ["transformer"], dtype)

    return watch


def not_finite(
    stage: str, tensor: str, when: str, components: Sequence[str], dtype: str
) -> VideoError:
    """The error for NaN or infinite values, which ``components`` made in ``dtype``."""
    wider = "" if dtype == Dtype.FLOAT32 else ", or try --dtype float32"
    return VideoError(
        f"{stage}: the {tensor} are not finite{when}; check the weights of "
        f"{' and '.join(components)}{wider}"
    )
