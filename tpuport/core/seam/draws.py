"""Random numbers that upstream draws inside a forward.

The numbers are inputs of the program. Torch draws them on the host before each call, in
upstream's order, so the generator gives what it would give upstream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import torch

from tpuport.core.arrays import array_dtype
from tpuport.errors import TpuportError


class DrawError(TpuportError):
    """Upstream draws random numbers in a way that is not known here."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One tensor of random numbers.

    Attributes:
        function: ``torch.randn`` or ``torch.rand``.
        shape, dtype: of the tensor.
        generator: upstream's; ``None`` is torch's own.
    """

    function: Callable[..., torch.Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype
    generator: torch.Generator | None = None

    @property
    def example(self) -> torch.Tensor:
        """A tensor of the shape and dtype, without numbers."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def numbers(self) -> torch.Tensor:
        """The next numbers of the generator."""
        return self.function(self.shape, dtype=self.dtype, generator=self.generator)


#: Where and how a tensor is made, which a program decides by itself.
_PLACES = {"device", "layout", "requires_grad", "pin_memory", "memory_format"}


@contextlib.contextmanager
def recorded(env: Any, given: Sequence[Any]) -> Iterator[list[Draw]]:
    """What is drawn while a program is traced.

    Args:
        env: torchax's environment.
        given: JAX arrays in place of the first draws; later draws are zeros.

    Raises:
        DrawError: numbers are drawn by another function than ``randn`` and ``rand``.
    """
    made: list[Draw] = []

    def drawn(
        function: Any,
        shape: Sequence[int],
        dtype: Any = None,
        generator: Any = None,
        **how: Any,
    ) -> Any:
        if unknown := how.keys() - _PLACES:
            raise DrawError(f"{function.__name__} with {', '.join(sorted(unknown))}")
        dtype = dtype or torch.get_default_dtype()
        number = len(made)
        made.append(Draw(function, tuple(shape), dtype, generator))
        if number < len(given):
            return env.j2t_iso(given[number])
        host = torch.empty(0, dtype=dtype, device="meta")
        return env.j2t_iso(jnp.zeros(tuple(shape), array_dtype(host)))

    def plain(function: Any) -> Any:
        def draw(*sizes: Any, size: Any = None, **how: Any) -> Any:
            if size is None:
                size = sizes if not sizes or isinstance(sizes[0], int) else sizes[0]
            return drawn(function, size, **how)

        return draw

    def alike(function: Any) -> Any:
        def draw(x: Any, *, dtype: Any = None, **how: Any) -> Any:
            return drawn(function, x.shape, dtype or x.dtype, **how)

        return draw

    def refuse(*_: Any) -> Any:
        raise DrawError(
            "upstream draws random numbers inside forward by another function than "
            "torch.randn and torch.rand, which programs cannot repeat"
        )

    stand_ins = {
        "randn": plain(torch.randn),
        "rand": plain(torch.rand),
        "randn_like": alike(torch.randn),
        "rand_like": alike(torch.rand),
    }
    originals = {name: getattr(torch, name) for name in stand_ins}
    env.get_and_rotate_prng_key = refuse
    for name, stand_in in stand_ins.items():
        setattr(torch, name, stand_in)
    try:
        yield made
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
        del env.get_and_rotate_prng_key
