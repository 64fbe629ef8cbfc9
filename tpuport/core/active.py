"""What the torch code that is being traced runs in.

Patches on upstream modules run inside a program; those that write a block for the chip
need the mesh, the platform and the torchax environment, which upstream's signatures do
not carry.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tpuport.core.ops import OpContext


@dataclass(frozen=True, slots=True)
class Active:
    """The environment and the context of the program that is being traced."""

    env: Any
    context: OpContext

    def arrays(self, tree: Any) -> Any:
        """JAX arrays in place of the tensors of a tree."""
        return self.env.t2j_iso(tree)

    def tensors(self, tree: Any) -> Any:
        """Tensors in place of the JAX arrays of a tree."""
        return self.env.j2t_iso(tree)

    def axis_size(self, name: str | None) -> int:
        """Devices along a mesh axis; 1 without it."""
        if name is None or self.context.mesh is None:
            return 1
        return int(dict(self.context.mesh.shape).get(name, 1))


_active: contextvars.ContextVar[Active | None] = contextvars.ContextVar(
    "tpuport_active", default=None
)


@contextlib.contextmanager
def activated(active: Active) -> Iterator[None]:
    """``current`` gives ``active`` in this block."""
    token = _active.set(active)
    try:
        yield
    finally:
        _active.reset(token)


def current() -> Active:
    """What is being traced.

    Raises:
        RuntimeError: nothing is.
    """
    active = _active.get()
    if active is None:
        raise RuntimeError(
            "this code runs only while tpuport traces a program; outside of one, "
            "upstream's own code is in place"
        )
    return active
