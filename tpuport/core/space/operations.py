"""What each operation makes of arrays that are a device's part of a picture.

A rule says what one result of an operation is. It raises :class:`MixedError` where the
operation is not local. Operations without a rule are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpuport.core.mesh.spatial_split import Side
from tpuport.core.space.factors import (
    Dim,
    Dims,
    Factor,
    MixedError,
    full,
    has_split,
    is_same,
    joined,
    reshaped,
    same,
    size_of,
    whole,
    whole_of,
)


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, as a rule sees it.

    Attributes:
        given: what the operands are.
        params: of the primitive.
        shape: of the result.
        sides: of the picture.
    """

    given: Sequence[Dims]
    params: Mapping[str, Any]
    shape: tuple[int, ...]
    sides: Sequence[Side]


Rule = Callable[[Operation], Dims]


def _refuse(what: str, *dims: Dim) -> None:
    for dim in dims:
        if has_split(dim):
            names = " and ".join(one.kind for one in dim if one.split)
            raise MixedError(f"{what} {names}")


def _each(op: Operation) -> Dims:
    """Element by element; a scalar counts for all elements."""
    out: Dims = ()
    for other in filter(None, op.given):
        out = tuple(map(joined, out, other)) if out else other
    return out


def _broadcast(op: Operation) -> Dims:
    found = [same(n) for n in op.shape]
    for dim, at in zip(op.given[0], op.params["broadcast_dimensions"], strict=True):
        if size_of(dim) == op.shape[at]:
            found[at] = dim
        else:
            _refuse("copies", dim)
    return tuple(found)


def _tile(op: Operation) -> Dims:
    found = []
    for dim, count, n in zip(op.given[0], op.params["reps"], op.shape, strict=True):
        if count > 1:
            _refuse("copies", dim)
            dim = same(n) if is_same(dim) else (Factor(n),)
        found.append(dim)
    return tuple(found)


def _reshape(op: Operation) -> Dims:
    if op.params.get("dimensions") is not None:
        raise MixedError("a reshape in another order")
    return reshaped(op.given[0], op.shape, op.sides)


def _without(dims: Dims, gone: Sequence[int]) -> list[Dim]:
    return [dim for at, dim in enumerate(dims) if at not in gone]


def _dropping(name: str, what: str) -> Rule:
    """A rule of an operation whose result lacks some dims."""

    def rule(op: Operation) -> Dims:
        (one, *_), gone = op.given, op.params[name]
        _refuse(what, *(one[at] for at in gone))
        return tuple(_without(one, gone))

    return rule


def _transpose(op: Operation) -> Dims:
    return tuple(op.given[0][at] for at in op.params["permutation"])


def _concatenate(op: Operation) -> Dims:
    along = op.params["dimension"]
    out: list[Dim] = list(op.given[0])
    for one in op.given:
        _refuse("joins along", one[along])
        for at, dim in enumerate(one):
            if at != along:
                out[at] = joined(out[at], dim)
    out[along] = full(op.shape[along])
    return tuple(out)


def _cut(given: Dims, shape: Sequence[int], what: str) -> Dims:
    """An array of which some elements are taken; rows and columns all."""
    found = []
    for dim, n in zip(given, shape, strict=True):
        if size_of(dim) != n:
            _refuse(what, dim)
            dim = same(n) if is_same(dim) else full(n)
        found.append(dim)
    return tuple(found)


def _slice(op: Operation) -> Dims:
    return _cut(op.given[0], op.shape, "takes some")


def _written(dim: Dim, part: Dim | None) -> Dim:
    """A dim of an array of which a part is written; ``None`` for one element."""
    if part is not None and size_of(dim) == size_of(part):
        return joined(dim, part)
    _refuse("writes to some", dim, part or ())
    return full(size_of(dim))


def _update(op: Operation) -> Dims:
    return tuple(map(_written, *op.given[:2]))


def _pad(op: Operation) -> Dims:
    found = []
    pads = op.params["padding_config"]
    for dim, n, around in zip(op.given[0], op.shape, pads, strict=True):
        if any(around):
            _refuse("pads", dim)
        found.append(full(n) if any(around) else dim)
    return tuple(found)


def _product(op: Operation) -> Dims:
    left, right = op.given
    (sums, others), (batch, batched) = op.params["dimension_numbers"]
    summed = (*(left[n] for n in sums), *(right[n] for n in others))
    _refuse("a product that sums over", *summed)
    found = [joined(left[a], right[b]) for a, b in zip(batch, batched, strict=True)]
    found += _without(left, (*sums, *batch))
    return (*found, *_without(right, (*others, *batched)))


def _convolution(op: Operation) -> Dims:
    numbers, out = op.params["dimension_numbers"], list(whole(op.shape))
    batch, *others = numbers.lhs_spec
    along = (op.given[0][at] for at in others)
    _refuse("a convolution without a border along", *along)
    _refuse("a convolution by an array with", *op.given[1])
    out[numbers.out_spec[0]] = op.given[0][batch]
    return tuple(out)


def _window(op: Operation) -> Dims:
    """A pool: rows and columns in groups of equal size, none on two devices."""
    found = []
    names = ("window_dimensions", "window_strides", "padding")
    windows = zip(*(op.params[name] for name in names), strict=True)
    for dim, (size, step, pads), n in zip(op.given[0], windows, op.shape, strict=True):
        if (size, step, *pads) == (1, 1, 0, 0):
            found.append(dim)
        elif not has_split(dim):
            found.append(full(n))
        else:
            one = dim[0]
            if len(dim) > 1 or one.border or size != step or one.size % size:
                raise MixedError(f"a window over {one.kind}")
            if tuple(pads) != (0, 0):
                raise MixedError(f"a padded window over {one.kind}")
            side = next(side for side in op.sides if side.axis == one.kind)
            if whole_of(side, one.size) % size:
                raise MixedError(f"a window over {one.kind} that does not divide them")
            found.append((Factor(n, one.kind),))
    return tuple(found)


def _gather(op: Operation) -> Dims:
    operand, indices = op.given
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    _refuse("looks up by an array with", *indices)
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    _refuse("looks up some", *(operand[at] for at in gone))
    kept = _cut(operand, sizes, "looks up some")
    out = list(whole(op.shape))
    for at, dim in zip(numbers.offset_dims, _without(kept, gone), strict=True):
        out[at] = dim
    return tuple(out)


def _scatter(op: Operation) -> Dims:
    operand, indices, updates = op.given
    numbers = op.params["dimension_numbers"]
    _refuse("writes by an array with", *indices)
    _refuse("writes one by one", *_without(updates, numbers.update_window_dims))
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    parts = iter(numbers.update_window_dims)
    return tuple(
        _written(dim, None if at in gone else updates[next(parts)])
        for at, dim in enumerate(operand)
    )


def _iota(op: Operation) -> Dims:
    found = [same(n) for n in op.shape]
    at = op.params["dimension"]
    found[at] = full(op.shape[at])
    return tuple(found)


def _along(name: str) -> Rule:
    """A rule of an operation along one dim or several."""

    def rule(op: Operation) -> Dims:
        found = op.params[name]
        along = (found,) if isinstance(found, int) else found
        refused = (one[at] for one in op.given for at in along)
        _refuse("an operation along", *refused)
        dims = enumerate(zip(op.given[0], op.shape, strict=True))
        return tuple(full(n) if at in along else dim for at, (dim, n) in dims)

    return rule


_ELEMENTWISE = (
    *("abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type"),
    *("copy", "copy_p", "cos", "cosh", "device_put", "div", "eq", "erf", "erf_inv"),
    *("erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite"),
    *("le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "name", "ne", "neg"),
    *("nextafter", "not", "or", "pow", "reduce_precision", "rem", "round", "rsqrt"),
    *("select_n", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub"),
    *("tan", "tanh", "xor"),
)

RULES: Mapping[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, _each),
    **dict.fromkeys(
        (
            *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and"),
            *("reduce_or", "argmax", "argmin"),
        ),
        _dropping("axes", "a reduction over"),
    ),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window
    ),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), _scatter),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "split"), _along("axis")),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "tile": _tile,
    "squeeze": _dropping("dimensions", "drops"),
    "transpose": _transpose,
    "concatenate": _concatenate,
    "slice": _slice,
    "dynamic_slice": _slice,
    "dynamic_update_slice": _update,
    "pad": _pad,
    "dot_general": _product,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "iota": _iota,
    "rev": _along("dimensions"),
    "sort": _along("dimension"),
}
"""By the primitive's name."""
