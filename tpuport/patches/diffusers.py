"""Patches of diffusers, with the version and the source that all of them are for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tpuport.core.tracing.patching import Patch

_SOURCE = "https://github.com/huggingface/diffusers/blob/v0.42.1/src/diffusers/"


def diffusers_patch(
    name: str,
    target: str,
    replacement: Callable[..., Any],
    reason: str,
    *,
    wraps: bool = False,
) -> Patch:
    """A :class:`Patch` of diffusers.

    Args:
        name, replacement, reason, wraps: as :class:`Patch` has them.
        target: within the package, such as ``"models.normalization:RMSNorm.forward"``.
    """
    module, _, _ = target.partition(":")
    return Patch(
        name=name,
        target=f"diffusers.{target}",
        replacement=replacement,
        wraps=wraps,
        reason=reason,
        upstream="diffusers>=0.42,<0.43",
        link=f"{_SOURCE}{module.replace('.', '/')}.py",
    )
