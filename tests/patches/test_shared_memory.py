"""Views that methods make: a write in place is seen by all that share the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch

from tests.patches.tools import model_runtime, traced
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.patches.standard import PATCHES
from tpuport.patches.strided import Strided

Change = Callable[[torch.Tensor], Any]

#: Each makes a view of [4, 6, 6].
VIEWS: dict[str, Change] = {
    "view": lambda x: x.view(-1),
    "view of two dims": lambda x: x.view(24, 6),
    "view by named shape": lambda x: x.view(size=(8, 18)),
    "view_as": lambda x: x.view_as(x.new_zeros(6, 24)),
    "reshape": lambda x: x.reshape(2, -1, 6),
    "torch.reshape": lambda x: torch.reshape(x, (-1,)),
    "reshape_as": lambda x: x.reshape_as(x.new_zeros(6, 24)),
    "flatten": lambda x: x.flatten(1),
    "torch.flatten": lambda x: torch.flatten(x, 0, 1),
    "ravel": lambda x: x.ravel(),
    "unflatten": lambda x: x.unflatten(1, (2, 3)),
    "select": lambda x: x.select(1, 2),
    "select of the last": lambda x: x.select(-1, 3),
    "narrow": lambda x: x.narrow(1, 1, 3),
    "transpose": lambda x: x.transpose(0, 1),
    "transpose twice": lambda x: x.transpose(0, 2).transpose(1, 2),
    "swapaxes": lambda x: x.swapaxes(0, 2),
    "t": lambda x: x[0].t(),
    "T": lambda x: x[1].T,
    "mT": lambda x: x.mT,
    "permute": lambda x: x.permute(2, 0, 1),
    "movedim": lambda x: x.movedim(0, -1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "chunk": lambda x: x.chunk(2, -1)[1],
    "split": lambda x: x.split([1, 5], 1)[1],
    "tensor_split": lambda x: x.tensor_split(3, 1)[1],
    "torch.tensor_split": lambda x: torch.tensor_split(x, 3, 1)[1],
    "unbind": lambda x: x.unbind(1)[4],
    "unpacked": lambda x: [*x][2],
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "diagonal aside": lambda x: x.diagonal(1, 0, 2),
    "windows side by side": lambda x: x.unfold(1, 2, 2),
    "windows apart": lambda x: x.unfold(2, 2, 4),
    "expand": lambda x: x.expand(4, 6, 6),
    "expand_as": lambda x: x.expand_as(x),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
    "contiguous": lambda x: x.contiguous(),
    "to": lambda x: x.to(x.dtype),
    "float": lambda x: x.float(),
    "as_strided": lambda x: x.as_strided((3, 2), (2, 1), 5),
    "view of a slice": lambda x: x[1:].view(-1),
    "transpose of a slice": lambda x: x[:, 1:3].transpose(0, 1),
    "transpose of every second": lambda x: x[..., ::2].transpose(0, 1),
    "every second of uneven": lambda x: x[1::2, 1].t(),
    "to of a slice": lambda x: x[1:].to(x.dtype),
    "contiguous slice": lambda x: x[1:].contiguous(),
    "detached slice": lambda x: x[1:].detach(),
    "chunk of a transpose": lambda x: x.transpose(0, 1).chunk(3)[1],
    "heads": lambda x: x.view(4, 6, 2, 3).transpose(1, 2),
    "view of a transpose back": lambda x: x.transpose(0, 1).transpose(0, 1).view(-1),
    "reshape of unsqueeze": lambda x: x.unsqueeze(1).reshape(-1),
}

#: Each makes a copy.
COPIES: dict[str, Change] = {
    "reshape of a transpose": lambda x: x.transpose(0, 1).reshape(-1),
    "flatten of a permute": lambda x: x.permute(2, 0, 1).flatten(),
    "reshape of a slice": lambda x: x[:, 1:3].reshape(-1),
    "contiguous transpose": lambda x: x.transpose(0, 1).contiguous(),
    "contiguous columns": lambda x: x[:, 1:3].contiguous(),
    "view of contiguous": lambda x: x.mT.contiguous().view(-1),
    "clone": lambda x: x.clone(),
    "clone of a view": lambda x: x.view(-1).clone(),
    "to with copy": lambda x: x.to(x.dtype, copy=True),
    "to another dtype": lambda x: x.to(torch.float16),
    "indexed by a list": lambda x: x[[0, 2]],
    "sum": lambda x: x.view(-1) + 0,
}

WRITES: dict[str, Change] = {
    "an element": lambda v: v.__setitem__(0, 7.0),
    "a slice": lambda v: v.__setitem__(slice(1, 2), -1.0),
    "add_": lambda v: v.add_(1),
    "mul_ by +=": lambda v: v.__imul__(2),
    "copy_": lambda v: v.copy_(v * 3 - 1),
    "copy_ of a row": lambda v: v.copy_(v[:1] + 0.5),
    "zero_": lambda v: v.zero_(),
    "fill_": lambda v: v.fill_(-0.0),
    "masked_fill_": lambda v: v.masked_fill_(v > 70, 5.0),
    "clamp_": lambda v: v.clamp_(10, 80),
    "addcmul_": lambda v: v.addcmul_(v, v),
    "a slice of a view": lambda v: v[..., 1:].mul_(2),
    "a further view": lambda v: v.unsqueeze(0).select(-1, 1).sub_(3),
}


def start() -> torch.Tensor:
    return torch.arange(4 * 6 * 6, dtype=torch.float32).reshape(4, 6, 6)


def by_tpuport(function: Callable[..., Any], *given: torch.Tensor, jit: bool) -> Any:
    runtime = model_runtime(mesh=None, platform="cpu", patches=PATCHES)
    call = traced(runtime, function)
    arrays = [jnp.asarray(to_numpy(one)) for one in given]
    return jax.tree.map(to_torch, (jax.jit(call) if jit else call)(*arrays))


def agree(function: Callable[..., Any], *given: torch.Tensor, jit: bool) -> None:
    """Torch and tpuport give the same bits; the arguments are compared too."""

    def call(*given: torch.Tensor) -> Any:
        return [*given], function(*given)

    expected = call(*(one.clone() for one in given))
    found = by_tpuport(call, *given, jit=jit)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    for number, (one, other) in enumerate(pairs):
        assert torch.equal(one, other), number
        assert torch.equal(torch.signbit(one), torch.signbit(other)), number


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "traced"])
@pytest.mark.parametrize("view", [*VIEWS, *COPIES])
def test_writes_reach_what_shares_the_memory(view: str, jit: bool) -> None:
    """Of each view, all writes: to the view, then to the base."""
    made = {**VIEWS, **COPIES}[view]

    def change(*xs: torch.Tensor) -> Any:
        kept = []
        for x, write in zip(xs, WRITES.values(), strict=True):
            base, other = x + 0, None
            one, two, other = made(base), made(base), base.view(-1)
            write(one)
            kept.append([t + 0 for t in (base, one, two, other)])
            base[1:, 2:4].add_(100)
            base.transpose(0, 1)[1].mul_(3)
            kept.append([base, one, two, other, made(x)])
        return kept

    agree(change, *(start() for _ in WRITES), jit=jit)
