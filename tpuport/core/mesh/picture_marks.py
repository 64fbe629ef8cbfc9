"""Marks in a program that is split in space: where its code exchanges what it needs.

An operation that looks beyond a device's part of the picture is wrong by itself, unless
its code brings what lies beside the part, or joins the devices' results. Such code
marks its results. The check of a split program (:mod:`tpuport.core.space.locality`)
believes marks and follows everything else. A mark is the identity, and no operation of
the compiled program.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

Sides = tuple[int, int]
"""Of rows, and of columns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What a marked array is.

    Attributes:
        name: of what made it, for people.
        dims: its dims of rows and of columns; ``None`` if it is whole on every device.
        given: those dims of the pictures that it was made from.
        added: elements that were put around the picture, in front and behind together.
        reach: elements that each result looks at.
        stride: from one result to the next.
    """

    name: str
    dims: Sides | None
    given: Sides
    added: Sides = (0, 0)
    reach: Sides = (1, 1)
    stride: Sides = (1, 1)


def marked(mark: Mark, made: jax.Array, *pictures: jax.Array | None) -> jax.Array:
    """``made``, marked.

    Args:
        pictures: what it was made from. The first may have a border.
    """
    given = [one for one in pictures if one is not None]
    out: jax.Array = _primitive().bind(made, *given, mark=mark)
    return out


NAME = "tpuport_mark"
"""Of the primitive."""


@functools.cache
def _primitive() -> Any:
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    def first(made: Any, *pictures: Any, mark: Mark) -> Any:
        return made

    def batched(args: Sequence[Any], dims: Sequence[Any], *, mark: Mark) -> Any:
        return args[0], dims[0]

    found = Primitive(NAME)
    found.def_impl(first)
    found.def_abstract_eval(first)
    mlir.register_lowering(found, lambda _, made, *pictures, mark: [made])
    batching.primitive_batchers[found] = batched
    return found
