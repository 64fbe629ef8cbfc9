"""Tensors that are computed when something reads them, and not before.

Their shape and dtype are known from the start. While blocks run under one scan, such
tensors go from block to block: upstream's loop hands them on without reading them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import torch


@functools.cache
def _deferred_class() -> Any:
    """A subclass of torchax's Tensor, made when torchax is there."""
    from torchax.ops import mappings
    from torchax.tensor import Tensor

    class Deferred(Tensor):
        def __init__(
            self, struct: Any, env: Any, read: Callable[[], Any], owner: Any
        ) -> None:
            torch.Tensor.__init__(self)
            self._struct = struct
            self._env = env
            self._read = read
            self._new: Any = None
            self.owner = owner

        @staticmethod
        def __new__(
            cls: Any, struct: Any, env: Any, read: Callable[[], Any], owner: Any
        ) -> Any:
            return Tensor.__new__(cls, struct, env)

        # torchax reads and writes the array of a tensor here and nowhere else.
        @property
        def _elem(self) -> Any:
            return self._read() if self._new is None else self._new

        @_elem.setter
        def _elem(self, value: Any) -> None:
            self._new = value
            self._struct = value

        @property
        def written(self) -> bool:
            """Whether the tensor was assigned to after it was made."""
            return self._new is not None

        @property
        def shape(self) -> Any:
            return torch.Size(self._struct.shape)

        @property
        def ndim(self) -> int:
            return len(self._struct.shape)

        @property
        def dtype(self) -> Any:
            return mappings.j2t_dtype(self._struct.dtype)

        def __str__(self) -> str:
            return f"Deferred({self.dtype} {[*self.shape]})"

        __repr__ = __str__

    return Deferred


def deferred(
    struct: jax.ShapeDtypeStruct,
    env: Any,
    read: Callable[[], jax.Array],
    owner: Any = None,
) -> torch.Tensor:
    """A torchax tensor that calls ``read`` whenever its array is asked for.

    ``struct`` has its shape and dtype, ``env`` is the torchax environment, ``owner``
    whatever made it: an attribute, which other tensors do not have.
    """
    tensor: torch.Tensor = _deferred_class()(struct, env, read, owner)
    return tensor


def defer(tensor: Any, read: Callable[[], jax.Array]) -> None:
    """Make a torchax tensor that is there call ``read`` from now on."""
    kept = vars(tensor)
    if not isinstance(tensor, _deferred_class()):
        array = kept.pop("_elem")
        kept["_struct"] = jax.ShapeDtypeStruct(array.shape, array.dtype)
        tensor.__class__ = _deferred_class()
    kept.update(_read=read, _new=None, owner=None)
