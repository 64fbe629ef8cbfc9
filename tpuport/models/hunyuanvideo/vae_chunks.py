"""The decoder of HunyuanVideo-1.5's autoencoder, one latent frame at a time.

Behind the middle block all looks back in time only: convolutions at the two frames
before. There a loop within the program decodes chunk by chunk, and each convolution
keeps the last two frames of its input for the next chunk. So the memory of a decode
does not grow with the video, besides the video itself.

One body serves all chunks. Of the first latent frame upstream makes one frame, of every
other as many as the body makes; the body makes copies of that one. Upstream repeats the
first frame in front of every convolution, so copies in front of it change nothing. They
are cut off the video.

Legend: B videos, C channels, T frames, Y rows, X columns; tensors are [B, C, T, Y, X].
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.tracing.context import current
from tpuport.patches.diffusers import diffusers_patch

_TIME = 2


@dataclass(kw_only=True, eq=False)
class Chunk:
    """One chunk while it is traced.

    Attributes:
        first: whether it is the video's first one; a boolean of the traced program.
        before: what each convolution kept, in the order in which they run; ``None``
            while only shapes are asked for.
        after: what each convolution keeps.
    """

    first: Any
    before: Iterator[jax.Array] | None
    after: list[jax.Array] = field(default_factory=list)

    def frames_before(self, x: jax.Array, count: int) -> jax.Array:
        """The ``count`` frames before ``x``; its own last ones are kept.

        Args:
            x: [B, T, Y, X, C], what a convolution is given.
        """
        before = jnp.repeat(x[:, :1], count, axis=1)
        if self.before is not None:
            before = jnp.where(self.first, before, next(self.before))
        kept = x if x.shape[1] >= count else jnp.concatenate([before, x], axis=1)
        self.after.append(kept[:, -count:])
        return before


_chunk: contextvars.ContextVar[Chunk | None] = contextvars.ContextVar(
    "tpuport_hunyuanvideo_chunk", default=None
)


def current_chunk() -> Chunk | None:
    """The chunk that is being traced; ``None`` if a whole video is traced."""
    return _chunk.get()


@contextlib.contextmanager
def _within(chunk: Chunk) -> Iterator[None]:
    token = _chunk.set(chunk)
    try:
        yield
    finally:
        _chunk.reset(token)


def _decoder(original: Callable[..., Any]) -> Callable[..., Any]:
    """``HunyuanVideo15Decoder3D.forward``, behind the middle block by chunks."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        frames = hidden_states.shape[_TIME]
        if frames == 1:
            return original(self, hidden_states)
        repeated = hidden_states.repeat_interleave(repeats=self.repeat, dim=1)
        x = self.mid_block(self.conv_in(hidden_states) + repeated)
        video = _by_chunks(lambda x: _enlarged(self, x), x)
        # The first chunk made copies of the first frame.
        return video[:, :, video.shape[_TIME] // frames - 1 :]

    return forward


def _enlarged(decoder: Any, x: torch.Tensor) -> torch.Tensor:
    """What upstream's forward does with the result of the middle block."""
    for block in decoder.up_blocks:
        x = block(x)
    return decoder.conv_out(decoder.conv_act(decoder.norm_out(x)))


def _by_chunks(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """``run`` of one frame after the other."""
    active = current()
    parts = jnp.moveaxis(active.arrays(x)[:, :, None], 3, 0)

    def step(
        before: list[jax.Array] | None, given: tuple[Any, jax.Array]
    ) -> tuple[list[jax.Array], jax.Array]:
        number, part = given
        kept = None if before is None else iter(before)
        chunk = Chunk(first=number == 0, before=kept)
        with _within(chunk):
            out = active.arrays(run(active.tensors(part)))
        return chunk.after, out

    noted = len(active.context.convolutions)
    shapes, _ = jax.eval_shape(lambda part: step(None, (jnp.int32(0), part)), parts[0])
    del active.context.convolutions[noted:]
    before = [jnp.zeros(one.shape, one.dtype) for one in shapes]
    numbers = jnp.arange(len(parts), dtype=jnp.int32)
    _, videos = jax.lax.scan(step, before, (numbers, parts))
    out = jnp.moveaxis(videos, 0, 2)
    found: torch.Tensor = active.tensors(
        out.reshape(*out.shape[:2], -1, *out.shape[4:])
    )
    return found


DECODER = diffusers_patch(
    "hunyuanvideo15-vae-decoder-in-chunks",
    "models.autoencoders.autoencoder_kl_hunyuanvideo15:HunyuanVideo15Decoder3D.forward",
    _decoder,
    "all frames at their full size together take 23 GiB of each of eight chips at "
    "720x1280 with 121 frames; what is behind the middle block runs chunk by chunk",
    wraps=True,
)
"""Belongs together with the patches of the convolutions."""
