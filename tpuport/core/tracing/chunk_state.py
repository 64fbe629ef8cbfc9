"""Videos chunk by chunk: what one chunk leaves for the next, as explicit state.

Upstream code that treats a video as a whole looks back in time only: a causal
convolution at the last few frames, causal attention at all frames so far. Patches of
such code say here what they look back at, and find it again in the next chunk. All of
it together is one dictionary by module path, the carry of a program: the first chunk
runs one program, all others of one length another, and the frames are those of the
whole video.

    def decode(model, carry, constants, given):
        total = constants["frames"].shape[0]
        return run_chunk(
            model, carry, given["latents"], start=given["start"], total=total
        )

Legend: B videos, C channels, T frames of a chunk, Y rows, X columns, N frames of all
chunks. Tensors are [B, C, T, Y, X], also those in the carry, so that one layout of
:class:`tpuport.core.mesh.spatial_split.SpatialLayout` says how all of them are split.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.tracing.context import current
from tpuport.core.tracing.ported_module import BoundModule
from tpuport.errors import PluginError

_TIME = 2

_chunk: contextvars.ContextVar[Chunk | None] = contextvars.ContextVar(
    "tpuport_chunk", default=None
)


def current_chunk() -> Chunk | None:
    """The chunk that is being traced; ``None`` where a video is traced as a whole."""
    return _chunk.get()


class Chunk:
    """One chunk while it is traced; patches read and write its state.

    Args:
        before: what the chunk before left, by name; ``None`` for the first chunk.
        start: index of the first frame in the whole video, int32; 0 in the first
            chunk.
        total: frames of the whole video, at the resolution of the chunk's input.

    Attributes:
        after: what this chunk leaves.
    """

    def __init__(
        self, before: Mapping[str, jax.Array] | None, start: Any, total: int
    ) -> None:
        self.start = start
        self.total = total
        self.after: dict[str, jax.Array] = {}
        self._before = before
        self._paths: dict[int, str] = {}

    @property
    def is_first(self) -> bool:
        """Whether nothing comes before it."""
        return self._before is None

    @contextlib.contextmanager
    def within(self, module: torch.nn.Module) -> Iterator[None]:
        """:func:`current_chunk` gives this one; ``module`` is the root of the paths."""
        self._paths = {id(child): path for path, child in module.named_modules()}
        token = _chunk.set(self)
        try:
            yield
        finally:
            _chunk.reset(token)

    def with_frames_before(
        self, module: torch.nn.Module, x: torch.Tensor, count: int, mode: str
    ) -> torch.Tensor:
        """``x`` behind the ``count`` frames before it, for a causal convolution.

        Args:
            module: that looks back.
            x: [B, C, T, Y, X].
            count: frames it looks back at.
            mode: of ``torch.nn.functional.pad``, for what is before the video.

        Returns:
            [B, C, count + T, Y, X]; the last ``count`` of them are kept.
        """
        if not count:
            return x
        name = self._name(module, "frames")
        if self._before is None:
            pads = (0, 0, 0, 0, count, 0)
            x = torch.nn.functional.pad(x, pads, mode=mode)
        else:
            x = torch.cat([current().tensors(self._found(name)), x], dim=_TIME)
        self.after[name] = current().arrays(x[:, :, -count:])
        return x

    def with_all_before(
        self, module: torch.nn.Module, name: str, x: torch.Tensor
    ) -> torch.Tensor:
        """``x`` among all frames so far, for attention that is causal by frames.

        They are kept in a buffer that is as long as the video, so that every chunk
        runs the same program.

        Args:
            module: that looks back.
            name: what this is to the module.
            x: [B, C, T, Y, X].

        Returns:
            in the first chunk ``x``; in others [B, C, N, Y, X] with ``x`` from frame
            ``start`` on, and zeros after it.
        """
        name = self._name(module, name)
        array = current().arrays(x)
        if self._before is None:
            pads = [(0, 0)] * array.ndim
            pads[_TIME] = (0, self.total - array.shape[_TIME])
            self.after[name] = jnp.pad(array, pads)
            return x
        kept = jax.lax.dynamic_update_slice_in_dim(
            self._found(name), array, self.start, axis=_TIME
        )
        self.after[name] = kept
        found: torch.Tensor = current().tensors(kept)
        return found

    def _name(self, module: torch.nn.Module, name: str) -> str:
        """Unique in a chunk.

        Raises:
            PluginError: the module is no part of the model, or called twice.
        """
        path = self._paths.get(id(module))
        if path is None or f"{path}.{name}" in self.after:
            why = "is not in the model" if path is None else "keeps it twice"
            raise PluginError(
                f"{type(module).__name__} {path or ''} {why}: {name!r} of a chunk is "
                "kept by the path of a module that runs once"
            )
        return f"{path}.{name}"

    def _found(self, name: str) -> jax.Array:
        assert self._before is not None
        if name not in self._before:
            raise PluginError(f"the chunk before kept no {name!r}")
        return self._before[name]


def run_chunk(
    model: BoundModule,
    carry: Mapping[str, jax.Array] | None,
    x: jax.Array,
    *,
    start: Any,
    total: int,
    method: str = "forward",
) -> tuple[dict[str, jax.Array], Any]:
    """Call a method of a module on a chunk of frames.

    Args:
        carry: what the chunk before left; ``None`` for the first one.
        x: [B, C, T, Y, X].
        start: index of its first frame, int32.
        total: frames of all chunks.
        method: of the module, called with ``x`` alone.

    Returns:
        what this chunk leaves, in arrays of the same shapes for any chunk, and what
        the method returns.

    Raises:
        PluginError: the chunk is longer than the video, or does not keep what the one
            before it kept.
    """
    if x.shape[_TIME] > total:
        raise PluginError(f"a chunk of {x.shape[_TIME]} of {total} frames")
    chunk = Chunk(carry, start, total)
    out = model(x, method=method, within=chunk.within)
    if carry is not None and set(carry) != set(chunk.after):
        odd = sorted(set(carry) ^ set(chunk.after))
        raise PluginError(f"kept by one chunk and not by the next: {', '.join(odd)}")
    return chunk.after, out


def chunk_lengths(frames: int, each: int) -> list[int]:
    """Frames of every chunk: ``each``, and what is left over in the first one.

    So that two programs do for any number of frames.
    """
    first = 1 + (frames - 1) % each
    return [first] + [each] * ((frames - first) // each)
