"""Conversions of torchax tensors, as torch does them."""

from __future__ import annotations

from typing import Any

from tpuport.core.tracing.patching import Patch


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
