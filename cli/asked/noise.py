"""Initial noise that the user brings along in a safetensors file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tpuport.core.files.atomic import one_line
from tpuport.errors import UsageError

if TYPE_CHECKING:
    import torch


def check_noise(file: str) -> None:
    """Refuse a file that holds no noise of [N, T, C, Y, X], or [T, C, Y, X].

    Raises:
        UsageError: what is in it, or why it cannot be read.
    """
    from safetensors import SafetensorError, deserialize

    try:
        content = Path(file).expanduser().read_bytes()
        tensors = dict(deserialize(content))  # type: ignore[no-untyped-call]
    except OSError as error:
        raise UsageError(
            f"--latents {file} cannot be read: {error.strerror}; name a safetensors "
            "file"
        ) from error
    except (SafetensorError, ValueError, KeyError) as error:
        raise UsageError(
            f"--latents {file} is not a safetensors file ({one_line(error)})"
        ) from error
    if len(tensors) != 1:
        raise UsageError(
            f"--latents {file} holds {len(tensors)} tensors "
            f"({', '.join(sorted(tensors)) or 'none'}); one is expected"
        )
    (about,) = tensors.values()
    shape, dtype = list(about["shape"]), str(about["dtype"])
    floats = dtype.startswith(("F", "BF"))
    if len(shape) not in (4, 5) or not all(shape) or not floats:
        raise UsageError(
            f"--latents {file} holds {dtype} of shape {shape}; floating point of shape "
            "[videos, latent frames, channels, rows, columns] is needed"
        )


def read_noise(file: str | None) -> torch.Tensor | None:
    """The noise in ``file``, [N, T, C, Y, X]; ``None`` for none."""
    if file is None:
        return None
    check_noise(file)
    import torch
    from safetensors.torch import load

    (tensor,) = load(Path(file).expanduser().read_bytes()).values()
    if tensor.ndim == 4:
        tensor = tensor[None]
    if not bool(torch.isfinite(tensor).all()):
        raise UsageError(f"--latents {file} holds NaN or infinite values")
    return tensor
