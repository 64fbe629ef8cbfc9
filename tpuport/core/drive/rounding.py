"""How far rounding to float32 may take a result: what a port is held to.

Upstream's code runs once more in float64. What float32 changes there is what float32 is
worth in that code, with those numbers; a port that rounds in another order, and is
right, is a few times as far off.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
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
#: What is never a fault: two units in the last place of the largest value.
LEAST = 2.0**-22
_WIDE = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64),
    torch.complex64: torch.complex128,
}


class InFloat64(TorchDispatchMode):
    """Computes in float64 what torch code has in float32; random numbers stay."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags:
            if "dtype" in {one.name for one in func._schema.arguments}:
                kwargs["dtype"] = torch.float32
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
    return [one.detach().double().numpy().copy() for one in tensors_in(found)]


def bound(float32: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> float:
    """The largest difference that a port of some code may have.

    Args:
        float32: what upstream's code gives.
        exact: what the code gives in float64.
    """
    return min(MOST, max(LEAST, TIMES * difference(float32, exact)))


def difference(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> float:
    """The largest difference, as a share of the largest value or of 1.

    Other shapes, and NaN on one side, are infinite.
    """
    worst = 0.0
    if [one.shape for one in found] != [other.shape for other in expected]:
        return float("inf")
    for one, other in zip(found, expected, strict=True):
        if one.dtype.kind not in "fiub" or not one.size:
            continue
        wide, truth = one.astype(np.float64), other.astype(np.float64)
        same = (wide == truth) | (np.isnan(wide) & np.isnan(truth))
        apart = np.where(same, 0.0, np.abs(wide - truth))
        scale = max(1.0, float(np.abs(truth[np.isfinite(truth)]).max(initial=0.0)))
        here = float(apart.max()) / scale
        worst = max(worst, here if here == here else float("inf"))
    return worst
