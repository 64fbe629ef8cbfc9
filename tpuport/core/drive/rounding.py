"""How far rounding to float32 may take a result: what a port is held to.

Upstream's code runs once more in float64. What float32 changes there is what float32 is
worth in that code, with those numbers; a port that rounds in another order, and is
right, is a few times as far off. That change may be small by luck, so upstream's code
runs in float32 with inputs a unit in the last place off too, and the largest counts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tpuport.core.seam.ported import upstreams_twin
from tpuport.core.seam.values import put_together, take_apart, tensors_in

#: The largest difference in float32, as a share of the largest value or of 1.
MOST = 1e-4
#: The port may be so many times as far off as upstream's own rounding.
TIMES = 8.0
#: Further runs in float32, each with inputs moved.
MOVED = 2
#: What is never a fault: eight units in the last place of the largest value.
LEAST = 2.0**-20
#: A tensor whose values are all below this is a tensor of zeros.
_ZERO = 2.0**-100
_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    torch.complex64: torch.complex128,
}
#: What random numbers are drawn in, where the code as it is does not have float64.
_DRAWN = {torch.float64: torch.float32, torch.complex128: torch.complex64}


class InFloat64(TorchDispatchMode):
    """Computes in float64 what torch code has in float32; random numbers stay."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            asked = {one.name: one.default_value for one in func._schema.arguments}
            if "dtype" in asked:
                dtype = _drawn(asked["dtype"], args, kwargs)
                kwargs["dtype"] = _DRAWN.get(dtype, dtype)
            return pytree.tree_map(_widened, func(*args, **kwargs))
        if kwargs.get("dtype") in _WIDE:
            kwargs["dtype"] = _WIDE[kwargs["dtype"]]
        if not func._schema.is_mutable:
            args, kwargs = pytree.tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


def in_float64(module: torch.nn.Module) -> torch.nn.Module:
    """A twin of a module for :func:`exactly`, with attributes of its own."""
    return upstreams_twin(module).double()


def wide(value: Any) -> Any:
    """A value with its own tensors, those in float32 in float64."""
    leaves: list[torch.Tensor] = []
    form = take_apart(value, leaves, [])
    return put_together(form, (_widened(one.detach().clone()) for one in leaves))


def _widened(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in _WIDE:
        return value.to(_WIDE[value.dtype])
    return value


def _drawn(default: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype:
    """The type that an operator draws in: as asked, its own, or its argument's."""
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"]
    if default is not None:
        return torch.int64  # of randint and randperm: the default is a number
    like = next((one for one in args if isinstance(one, torch.Tensor)), None)
    return torch.get_default_dtype() if like is None else like.dtype


@dataclass(frozen=True, slots=True)
class Measured:
    """What upstream's code gives.

    Attributes:
        exact: in float64.
        moved: in float32, with inputs a unit in the last place off.
    """

    exact: list[np.ndarray]
    moved: list[list[np.ndarray]] = field(default_factory=list)


def measured(
    run: Callable[[Any, Callable[[Any], Any]], Any], module: torch.nn.Module
) -> Measured | None:
    """What rounding changes; ``None`` where the code does not run in float64.

    Args:
        run: calls the module that it is given, with inputs that go through the function
            that it is given.
        module: upstream's.
    """
    try:
        exact = exactly(lambda: run(in_float64(module), wide))
    except Exception:  # foreign code: asserts a dtype, say
        return None
    moved = []
    for seed in range(MOVED):
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            own = functools.partial(_moved, seed=seed)
            moved.append(arrays(run(upstreams_twin(module), own)))
    return Measured(exact, moved)


def _moved(value: Any, seed: int) -> Any:
    """A value with its own tensors, each number a unit up or down; integers stay."""
    random = np.random.default_rng(seed)

    def move(one: torch.Tensor) -> torch.Tensor:
        if one.dtype == torch.complex64:
            real = torch.view_as_real(one.resolve_conj())
            return torch.view_as_complex(move(real))
        if one.dtype != torch.float32:
            return one.clone()
        own = one.numpy()
        up = np.where(random.random(own.shape) < 0.5, np.inf, -np.inf)
        moved = np.nextafter(own, up.astype(own.dtype))
        return torch.from_numpy(np.where(own == np.round(own), own, moved))

    leaves: list[torch.Tensor] = []
    form = take_apart(value, leaves, [])
    return put_together(form, (move(one.detach()) for one in leaves))


def exactly(run: Callable[[], Any]) -> list[np.ndarray]:
    """The tensors that torch code gives in float64; no random state changes."""
    before = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.no_grad())
        torch.set_default_dtype(torch.float64)
        stack.callback(torch.set_default_dtype, before)
        stack.enter_context(InFloat64())
        found = run()
    return arrays(found, torch.float64)


def arrays(value: Any, dtype: torch.dtype = torch.float32) -> list[np.ndarray]:
    """The tensors in a value; a last dimension has real and imaginary parts."""
    tensors = [one.detach() for one in tensors_in(value)]
    real = [
        torch.view_as_real(one.resolve_conj()) if one.is_complex() else one
        for one in tensors
    ]
    return [one.to(dtype).numpy().copy() for one in real]


def comparable(found: Sequence[np.ndarray]) -> int:
    """How many arrays have numbers, NaN left out."""
    return sum(one.dtype.kind in "fiubc" and not np.isnan(one).all() for one in found)


def bounds(float32: Sequence[np.ndarray], found: Measured | None) -> list[float]:
    """The largest difference that each tensor of a port may have.

    Shares of the tensor's own largest value. Where values cancel, upstream's own
    difference may be as large as that value, and is the bound.

    Args:
        float32: what upstream's code gives.
        found: what rounding changes; ``None`` if that is not known.
    """
    if found is None or _shapes(float32) != _shapes(found.exact):
        return [MOST] * len(float32)
    scales = [_scale(one) for one in float32]
    draws = [differences(float32, found.exact, scales)]
    draws += [differences(one, found.exact, scales) for one in found.moved]
    return [
        min(MOST * max(1.0, 1 / scale), max(LEAST, TIMES * max(own)))
        for scale, *own in zip(scales, *draws, strict=True)
    ]


def furthest(
    found: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    allowed: Sequence[float],
) -> tuple[float, float]:
    """The difference and the bound of the tensor that is worst for its bound."""
    if _shapes(found) != _shapes(expected):
        return float("inf"), LEAST
    pairs = zip(differences(found, expected), allowed, strict=True)
    return max(pairs, key=lambda one: one[0] / one[1], default=(0.0, LEAST))


def difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest of :func:`differences`; infinite where one side has more tensors."""
    if len(found) != len(expected):
        return float("inf")
    return max(differences(found, expected), default=0.0)


def differences(
    found: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
    scales: Sequence[float] = (),
) -> list[float]:
    """The largest difference of each tensor expected, as a share of its largest value.

    Of 1 where a tensor is zero. Other shapes, and NaN on one side, are infinite.

    Args:
        scales: in place of the largest values.
    """
    if _shapes(found) != _shapes(expected):
        return [float("inf")] * len(expected)
    scales = scales or [_scale(one) for one in expected]
    return [_difference(*one) for one in zip(found, expected, scales, strict=True)]


def _difference(one: np.ndarray, other: np.ndarray, scale: float) -> float:
    if not comparable([one]) and not comparable([other]):
        return 0.0
    kind = np.complex128 if "c" in one.dtype.kind + other.dtype.kind else np.float64
    wide, truth = one.astype(kind), other.astype(kind)
    same = (wide == truth) | (np.isnan(wide) & np.isnan(truth))
    with np.errstate(invalid="ignore"):  # of infinities
        apart = np.where(same, 0.0, np.abs(wide - truth))
    found = float(apart.max()) / scale
    return found if found == found else float("inf")


def _scale(truth: np.ndarray) -> float:
    """What differences are a share of."""
    if truth.dtype.kind not in "fiubc":
        return 1.0
    sizes = np.abs(truth.astype(np.complex128 if truth.dtype.kind == "c" else float))
    largest = float(sizes[np.isfinite(sizes)].max(initial=0.0))
    return largest if largest > _ZERO else 1.0


def _shapes(found: Sequence[np.ndarray]) -> list[tuple[int, ...]]:
    return [one.shape for one in found]
