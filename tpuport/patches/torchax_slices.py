"""Patches on torchax itself, for code that was written for eager tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import torch

from tpuport.core.tracing.context import current, tracing_now
from tpuport.core.tracing.patching import Patch
from tpuport.core.tracing.strided import write_box
from tpuport.patches.constants import on_device
from tpuport.patches.pairs import on_lanes, put_together

#: Where a tensor keeps the parts that it was put together from.
_PARTS = "_tpuport_parts"


def _slice_start_and_size(
    slices: Any, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Start and size of a box of ``shape``, or ``None`` when it is not a plain box."""
    slices = slices if isinstance(slices, tuple) else (slices,)
    if Ellipsis in slices:
        at = slices.index(Ellipsis)
        fill = (slice(None),) * (len(shape) - len(slices) + 1)
        slices = slices[:at] + fill + slices[at + 1 :]
    if len(slices) > len(shape) or not all(isinstance(s, slice) for s in slices):
        return None
    starts: list[int] = []
    sizes: list[int] = []
    for dim, size in enumerate(shape):
        start, stop, step = (
            slices[dim].indices(size) if dim < len(slices) else (0, size, 1)
        )
        if step != 1:
            return None
        starts.append(start)
        sizes.append(max(stop - start, 0))
    return tuple(starts), tuple(sizes)


def _every_nth(slices: Any, rank: int) -> tuple[int, int] | None:
    """First and step of ``x[..., first::step]``; ``None`` for another key."""
    if not isinstance(slices, tuple) or len(slices) != 2 or slices[0] is not Ellipsis:
        return None
    last = slices[1]
    if not isinstance(last, slice) or last.stop is not None or rank == 0:
        return None
    first, step = last.start or 0, last.step or 1
    return (first, step) if step > 1 and 0 <= first < step else None


def write_slice(x: jax.Array, key: Any, value: Any) -> jax.Array | None:
    """``x`` with ``x[key] = value`` done; ``None`` for keys that are no plain box.

    ``x[..., 1::2] = value`` is done too: rotary embeddings are written so.

    Args:
        x: of any shape.
        key: what stands in the brackets.
        value: broadcasts to the shape of ``x[key]``, as in torch.
    """
    if parts := _parts_written(x, key, value):
        return _joined(parts, x.shape)
    value = _fitting(value)
    box = _slice_start_and_size(key, x.shape)
    if box is None or 0 in box[1]:
        return None
    starts, sizes = box
    return write_box(x, jnp.broadcast_to(value, sizes).astype(x.dtype), starts)


def _parts_written(
    x: jax.Array, key: Any, value: Any, known: Sequence[jax.Array] | None = None
) -> list[jax.Array]:
    """The parts ``x[..., i::n]`` once ``x[..., first::n] = value`` is done.

    Args:
        known: the parts before, if they are known.

    Returns:
        nothing for another key, or if n does not divide the last dim.
    """
    every = _every_nth(key, x.ndim)
    if every is None or x.shape[-1] % every[1]:
        return []
    first, step = every
    # By a dim of their own: the compiler sees through a part that is replaced.
    apart = x.reshape(*x.shape[:-1], -1, step)
    parts = list(known or (apart[..., i] for i in range(step)))
    if getattr(value, "ndim", 0) > x.ndim:
        value = _fitting(value)
    parts[first] = jnp.broadcast_to(value, parts[first].shape).astype(x.dtype)
    return parts


def _joined(parts: Sequence[jax.Array], shape: Sequence[int]) -> jax.Array:
    """The array that consists of the parts ``x[..., i::n]``."""
    platform = current().context.platform if tracing_now() else ""
    apart = (*parts[0].shape, len(parts))
    quick = on_lanes(platform, apart, parts[0].dtype)
    joined = put_together(parts) if quick else jnp.stack(parts, axis=-1)
    return joined.reshape(shape)


def _fitting(value: Any) -> Any:
    """What is assigned, without leading dims of 1: torch lets them be, JAX does not."""
    if not isinstance(value, jax.Array):
        return value
    extra = next((i for i, size in enumerate(value.shape) if size != 1), value.ndim)
    return value.reshape(value.shape[extra:])


def _update_view(original: Callable[..., Any]) -> Callable[..., Any]:
    """Writing through a view of a tensor."""

    def update_tensor(self: Any, new_value: jax.Array, jax_array: jax.Array) -> Any:
        written = write_slice(jax_array, self.slices, new_value)
        if written is not None:
            return written
        return original(self, _fitting(new_value), jax_array)

    return update_tensor


def _set_item(original: Callable[..., Any]) -> Callable[..., Any]:
    """Writing to a tensor itself."""

    def __setitem__(self: Any, key: Any, val: Any) -> None:
        key, val = on_device(self._env, (key, val))
        value = val.jax() if hasattr(val, "jax") else val
        # Part after part is written: what was put together need not come apart again.
        array, known = vars(self).get(_PARTS, (None, None))
        known = known if array is self._elem else None
        parts = _parts_written(self._elem, key, value, known)
        if parts:
            self._elem = _joined(parts, self._elem.shape)
            setattr(self, _PARTS, (self._elem, parts))
            return
        written = write_slice(self._elem, key, value)
        if written is None:
            original(self, key, _fitting(value))
        else:
            self._elem = written

    return __setitem__


def _set_item_of_view(original: Callable[..., Any]) -> Callable[..., Any]:
    """Writing to a part of a view by a key that may have tensors."""

    def __setitem__(self: Any, key: Any, val: Any) -> None:
        key, val = on_device(self._env, (key, val))
        original(self, self._env.t2j_iso(key), val)

    return __setitem__


def _look_up(original: Callable[..., Any]) -> Callable[..., Any]:
    """Which implementation an operator has."""

    def _get_op_or_decomp(self: Any, func: Any) -> Any:
        from torchax.ops.op_base import InplaceOp
        from torchax.ops.ops_registry import Operator
        from torchax.tensor import OperatorNotFound

        name = getattr(func, "__name__", "").partition(".")[0]
        functional: Any = getattr(torch.ops.aten, name[:-1], None)
        in_place = name.endswith("_") and functional is not None
        try:
            found = original(self, func)
            if found.is_view_op or not in_place:
                return found
        except OperatorNotFound:
            if not in_place:
                raise
        return Operator(
            torch_op=func,
            func=InplaceOp(
                lambda x, *args, **kwargs: functional(x, *args, **kwargs).to(x.dtype),
                replace=True,
            ),
            is_jax_function=False,
            is_user_defined=False,
            needs_env=False,
            is_view_op=True,
        )

    return _get_op_or_decomp


IN_PLACE = Patch(
    name="torchax-in-place-on-views",
    target="torchax.tensor:Environment._get_op_or_decomp",
    replacement=_look_up,
    wraps=True,
    reason="operators in place that torchax knows by decomposition alone, such as "
    "addcmul_, change a copy if they are called on a view: x[..., :1].addcmul_(a, b) "
    "leaves x as it was. LTX-2 rotates its queries this way. Others, such as cumsum_, "
    "it does not know",
    upstream="torchax==0.0.13",
    link="https://github.com/google/torchax",
)
"""For any model that calls rarer operators in place."""

SLICE_ASSIGNMENT = tuple(
    Patch(
        name=f"torchax-slice-assignment-{name}",
        target=target,
        replacement=replacement,
        wraps=True,
        reason="`x[:, :, n:] = f(x[:, :, n:])` under jit gives wrong values on the CPU "
        "compiler of jaxlib 0.10.2, at some batch sizes: CogVideoX rotates its queries "
        "this way, and its output is 0.1 off. Right eagerly, with the fusion pass or "
        "the algebraic simplifier off, and when slices are joined instead",
        upstream="torchax==0.0.13",
        link="https://github.com/google/torchax",
    )
    for name, target, replacement in (
        ("tensor", "torchax.tensor:Tensor.__setitem__", _set_item),
        ("view", "torchax.view:NarrowInfo.update_tensor", _update_view),
        ("part", "torchax.view:View.__setitem__", _set_item_of_view),
    )
)
"""For any model that assigns to slices inside ``forward``."""


@dataclass(frozen=True)
class _Reshaped:
    """A view of other dims, in the form of torchax's own kinds of views."""

    shape: tuple[int, ...]

    def transform_tensor(self, jax_array: jax.Array) -> jax.Array:
        return jax_array.reshape(self.shape)

    def update_tensor(self, new_value: jax.Array, jax_array: jax.Array) -> jax.Array:
        return new_value.reshape(jax_array.shape)

    def calculate_output_shape(self, source: jax.Array) -> tuple[int, ...]:
        return source.reshape(self.shape).shape


def _with_known_bounds(original: Callable[..., Any]) -> Callable[..., Any]:
    """A slice whose bounds are numbers at once, where they are tensors."""

    def __init__(self: Any, slices: Any) -> None:
        is_tuple = isinstance(slices, tuple)
        found = tuple(map(_known, slices)) if is_tuple else _known(slices)
        original(self, found)

    return __init__


def _known(key: Any) -> Any:
    if not isinstance(key, slice):
        return key
    bounds = (key.start, key.stop, key.step)
    return slice(*(None if b is None else operator.index(b) for b in bounds))


VIEW_BOUNDS = Patch(
    name="torchax-slice-bounds",
    target="torchax.view:NarrowInfo.__init__",
    replacement=_with_known_bounds,
    wraps=True,
    reason="`x[:, : lengths[0]]` fails where the slice is read: torchax keeps a tensor "
    "as a bound and asks for its value when no tensor may be computed with",
    upstream="torchax==0.0.13",
    link="https://github.com/google/torchax",
)
"""For any model that cuts a tensor at a length that another tensor holds."""


def _with_array(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a view lacks: an array, a list of its numbers, a view of other dims."""

    def __getattribute__(self: Any, name: str) -> Any:
        if name == "_elem":
            return self.jax()
        if name == "tolist":
            return self.jax().tolist
        if name != "view":
            return original(self, name)

        def view(*shape: Any, **kwargs: Any) -> Any:
            if kwargs or isinstance(shape[0], torch.dtype):
                return original(self, name)(*shape, **kwargs)
            dims = shape if isinstance(shape[0], int) else tuple(shape[0])
            return self.create_sub_view(_Reshaped(dims))

        return view

    return __getattribute__


VIEW_ARRAY = Patch(
    name="torchax-view-array",
    target="torchax.view:View.__getattribute__",
    replacement=_with_array,
    wraps=True,
    reason="`x[1:][[0, -1]]` ends in an AttributeError: torchax reads `_elem` of the "
    "slice, which tensors have and slices have not; `x[0].tolist()` ends in torch; "
    "`x[:, :n].view(shape)[:, :m] = y` writes to a copy. Wan-Animate-2 does both",
    upstream="torchax==0.0.13",
    link="https://github.com/google/torchax",
)
"""For any model that works on a slice as on a tensor."""


def type_as(self: Any, other: Any) -> Any:
    """``torch.Tensor.type_as``: a new tensor; ``self`` stays what it is."""
    return self.to(other.dtype)


TYPE_AS = Patch(
    name="torchax-type-as",
    target="torchax.tensor:Tensor.type_as",
    replacement=type_as,
    reason="torchax converts the tensor itself and hands it back: the tensor before is "
    "changed, and torch still takes it for the old type and refuses a convolution",
    upstream="torchax==0.0.13",
    link="https://github.com/google/torchax",
)
"""For any model that calls ``type_as``."""
