"""Videos chunk by chunk: what one chunk leaves for the next, as explicit state.

Upstream code for a whole video looks back in time only: a causal convolution at the
last few frames, causal attention at all frames so far. Patches of such code keep here
what the next chunk looks back at. All kept tensors are one dictionary by module path,
the carry of a program. The first chunk runs one program, all others of one length run
another, and the frames equal those of the whole video.

    def decode(model, carry, constants, given):
        total = constants["frames"].shape[0]
        return run_chunk(
            model, carry, given["latents"], start=given["start"], total=total
        )

Legend: B videos, C channels, T frames of a chunk, Y rows, X columns, N frames of all
chunks. All tensors are [B, C, T, Y, X], in the carry too, so that one layout of
:class:`tpuport.core.mesh.spatial_split.SpatialLayout` says how tensors are split.
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
    """The chunk that is being traced; ``None`` if a whole video is traced."""
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
        """Whether this chunk is the first of the video."""
        return self._before is None

    @contextlib.contextmanager
    def within(self, module: torch.nn.Module) -> Iterator[None]:
        """:func:`current_chunk` gives this chunk; paths start at ``module``."""
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
            module: the module that looks back.
            x: [B, C, T, Y, X].
            mode: ``torch.nn.functional.pad``'s, for frames before the video.

        Returns:
            [B, C, count + T, Y, X]; the last ``count`` frames are kept.
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

        The frames are kept in a buffer as long as the video, so that one program serves
        every chunk. ``name`` is that of ``x`` within ``module``, which looks back.

        Returns:
            ``x`` in the first chunk; in others [B, C, N, Y, X] with ``x`` from frame
            ``start`` on, and zeros behind.
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
        """The key of a tensor, unique in a chunk.

        Raises:
            PluginError: the module is not in the model, or is called twice.
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
        carry: what the chunk before left; ``None`` for the first chunk.
        x: [B, C, T, Y, X], all that the method is called with.
        start: index of the first frame of ``x``, int32.
        total: frames of all chunks.

    Returns:
        what this chunk leaves, in arrays of equal shapes for all chunks, and the
        result of the method.

    Raises:
        PluginError: the chunk is longer than the video, or does not keep what the chunk
            before kept.
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
    """Frames of every chunk: ``each``, and the remainder in the first chunk.

    Two programs then serve any number of frames.
    """
    first = 1 + (frames - 1) % each
    return [first] + [each] * ((frames - first) // each)
