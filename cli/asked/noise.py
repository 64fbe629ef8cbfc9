"""Initial noise that the user brings along in a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tpuport.core.files.atomic import one_line
from tpuport.errors import UsageError

if TYPE_CHECKING:
    import torch


def read_noise(file: str | None) -> torch.Tensor | None:
    """The noise in ``file``, [N, T, C, Y, X]; ``None`` for none."""
    if file is None:
        return None
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(Path(file).expanduser().read_bytes())
    except OSError as error:
        raise UsageError(
            f"latents file {file} cannot be read: {error.strerror}"
        ) from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise UsageError(
            f"latents file {file} is not a safetensors file ({one_line(error)})"
        ) from error
    if len(tensors) != 1:
        raise UsageError(
            f"latents file {file} holds {len(tensors)} tensors "
            f"({', '.join(sorted(tensors)) or 'none'}); one is expected"
        )
    (tensor,) = tensors.values()
    if tensor.ndim == 4:
        tensor = tensor[None]
    shape = list(tensor.shape)
    if tensor.ndim != 5 or not tensor.numel() or not tensor.is_floating_point():
        raise UsageError(
            f"latents file {file} holds a {tensor.dtype} of shape {shape}; floating "
            "point of shape [videos, latent frames, channels, rows, columns] is needed"
        )
    if not bool(torch.isfinite(tensor).all()):
        raise UsageError(f"latents file {file} holds NaN or infinite values")
    return tensor
