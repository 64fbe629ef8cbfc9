"""What each operation makes of arrays that are a device's part of a picture.

A rule gets what the operands are, the operation's parameters, the shapes of its results
and the sides of the picture. It raises :class:`MixedError` where the operation is not
local. Operations without a rule are not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tpuport.core.mesh.spatial_split import Side
from tpuport.core.space.factors import (
    SAME,
    WHOLE,
    Dim,
    Dims,
    Factor,
    MixedError,
    has_split,
    joined,
    reshaped,
    size_of,
    whole,
    whole_of,
)

Rule = Callable[
    [Sequence[Dims], Mapping[str, Any], Sequence[tuple[int, ...]], Sequence[Side]],
    list[Dims],
]
Shapes = Sequence[tuple[int, ...]]
Sides = Sequence[Side]
Params = Mapping[str, Any]


def _refuse(dim: Dim, what: str) -> None:
    if has_split(dim):
        names = " and ".join(one.kind for one in dim if one.split)
        raise MixedError(f"{what} {names}")


def _each(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    """Element by element; a scalar counts for all elements."""
    out: Dims = ()
    for other in filter(None, given):
        out = tuple(map(joined, out, other)) if out else other
    return [out] * len(shapes)


def _one_by_one(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    return list(given)


def _broadcast(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    (shape,) = shapes
    found: list[Dim] = [(Factor(n, SAME),) for n in shape]
    for dim, at in zip(given[0], params["broadcast_dimensions"], strict=True):
        if size_of(dim) == shape[at]:
            found[at] = dim
        else:
            _refuse(dim, "copies")
    return [tuple(found)]


def _tile(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    found = []
    for dim, count, n in zip(given[0], params["reps"], shapes[0], strict=True):
        if count > 1:
            _refuse(dim, "copies")
        same = count == 1 or all(one.kind == SAME for one in dim)
        found.append(dim if count == 1 else (Factor(n, SAME if same else WHOLE),))
    return [tuple(found)]


def _reshape(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    if params.get("dimensions") is not None:
        raise MixedError("a reshape in another order")
    return [reshaped(given[0], shapes[0], sides)]


def _squeeze(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    gone = params["dimensions"]
    for at in gone:
        _refuse(given[0][at], "drops")
    return [tuple(dim for at, dim in enumerate(given[0]) if at not in gone)]


def _transpose(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    return [tuple(given[0][at] for at in params["permutation"])]


def _reduce(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    axes = params["axes"]
    for at in axes:
        _refuse(given[0][at], "a reduction over")
    return [tuple(dim for at, dim in enumerate(given[0]) if at not in axes)] * len(
        shapes
    )


def _concatenate(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    along = params["dimension"]
    out: list[Dim] = list(given[0])
    for one in given:
        _refuse(one[along], "joins along")
        for at, dim in enumerate(one):
            if at != along:
                out[at] = joined(out[at], dim)
    out[along] = whole(shapes[0])[along]
    return [tuple(out)]


def _cut(given: Dims, shape: tuple[int, ...], what: str = "takes some") -> Dims:
    """An array of which some elements are taken; rows and columns all."""
    found = []
    for dim, n in zip(given, shape, strict=True):
        if size_of(dim) == n:
            found.append(dim)
            continue
        _refuse(dim, what)
        same = all(one.kind == SAME for one in dim)
        found.append((Factor(n, SAME),) if same else whole((n,))[0])
    return tuple(found)


def _slice(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    return [_cut(given[0], shapes[0])]


def _update(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    operand, update = given[:2]
    found = []
    for dim, part in zip(operand, update, strict=True):
        if size_of(dim) == size_of(part):
            found.append(joined(dim, part))
            continue
        _refuse(dim, "writes to some")
        _refuse(part, "writes to some")
        found.append(whole((size_of(dim),))[0])
    return [tuple(found)]


def _pad(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    found = []
    for dim, n, pads in zip(given[0], shapes[0], params["padding_config"], strict=True):
        if any(pads):
            _refuse(dim, "pads")
        found.append(whole((n,))[0] if any(pads) else dim)
    return [tuple(found)]


def _product(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    left, right = given
    (sums, others), (batch, batched) = params["dimension_numbers"]
    for dims, at in ((left, sums), (right, others)):
        for n in at:
            _refuse(dims[n], "a product that sums over")
    found = [joined(left[a], right[b]) for a, b in zip(batch, batched, strict=True)]
    for dims, used in ((left, (*sums, *batch)), (right, (*others, *batched))):
        found += [dim for at, dim in enumerate(dims) if at not in used]
    return [tuple(found)]


def _convolution(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    numbers, out = params["dimension_numbers"], list(whole(shapes[0]))
    batch, *others = numbers.lhs_spec
    for at in others:
        _refuse(given[0][at], "a convolution without a border along")
    for dim in given[1]:
        _refuse(dim, "a convolution by an array with")
    out[numbers.out_spec[0]] = given[0][batch]
    return [tuple(out)]


def _window(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    """A pool: rows and columns in groups of equal size, none on two devices."""
    found = []
    rows = zip(
        given[0],
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        shapes[0],
        strict=True,
    )
    for dim, size, step, pads, n in rows:
        if (size, step, *pads) == (1, 1, 0, 0):
            found.append(dim)
        elif not has_split(dim):
            found.append(whole((n,))[0])
        else:
            one = dim[0]
            if len(dim) > 1 or one.border or size != step or one.size % size:
                raise MixedError(f"a window over {one.kind}")
            if tuple(pads) != (0, 0):
                raise MixedError(f"a padded window over {one.kind}")
            side = next(side for side in sides if side.axis == one.kind)
            if whole_of(side, one.size) % size:
                raise MixedError(f"a window over {one.kind} that does not divide them")
            found.append((Factor(n, one.kind),))
    return [tuple(found)]


def _gather(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    operand, indices = given
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    for dim in indices:
        _refuse(dim, "looks up by an array with")
    gone = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    for at, dim in enumerate(operand):
        if has_split(dim) and (at in gone or sizes[at] != size_of(dim)):
            _refuse(dim, "looks up some")
    kept = _cut(operand, tuple(sizes), "looks up some")
    out = list(whole(shapes[0]))
    left = [dim for at, dim in enumerate(kept) if at not in gone]
    for at, dim in zip(numbers.offset_dims, left, strict=True):
        out[at] = dim
    return [tuple(out)]


def _scatter(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    operand, indices, updates = given
    numbers = params["dimension_numbers"]
    for dim in indices:
        _refuse(dim, "writes by an array with")
    gone = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [at for at in range(len(operand)) if at not in gone]
    window = dict(zip(kept, numbers.update_window_dims, strict=True))
    for at, dim in enumerate(updates):
        if at not in numbers.update_window_dims:
            _refuse(dim, "writes one by one")
    found = []
    for at, dim in enumerate(operand):
        part = updates[window[at]] if at in window else None
        if part is not None and size_of(part) == size_of(dim):
            found.append(joined(dim, part))
            continue
        _refuse(dim, "writes to some")
        if part is not None:
            _refuse(part, "writes to some")
        found.append(whole((size_of(dim),))[0])
    return [tuple(found)]


def _iota(
    given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
) -> list[Dims]:
    at, (shape,) = params["dimension"], shapes
    found: list[Dim] = [(Factor(n, SAME),) for n in shape]
    found[at] = whole(shape)[at]
    return [tuple(found)]


def _along(name: str) -> Rule:
    """A rule of an operation along one dim or several."""

    def rule(
        given: Sequence[Dims], params: Params, shapes: Shapes, sides: Sides
    ) -> list[Dims]:
        found = params[name]
        along = (found,) if isinstance(found, int) else found
        for one in given:
            for at in along:
                _refuse(one[at], "an operation along")
        return [
            tuple(
                whole((n,))[0] if at in along else dim
                for at, (dim, n) in enumerate(zip(given[0], shape, strict=True))
            )
            for shape in shapes
        ]

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
    **dict.fromkeys(("optimization_barrier",), _one_by_one),
    **dict.fromkeys(
        (
            *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and"),
            *("reduce_or", "argmax", "argmin"),
        ),
        _reduce,
    ),
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window
    ),
    **dict.fromkeys(("scatter", "scatter-add", "scatter_add"), _scatter),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "split"), _along("axis")),
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "tile": _tile,
    "squeeze": _squeeze,
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
