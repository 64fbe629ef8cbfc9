"""Between torch tensors, NumPy and JAX arrays, bfloat16 included."""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    import torch
    from jax import Array as Array
    from jaxtyping import Bool as Bool
    from jaxtyping import Float as Float
    from jaxtyping import Float32 as Float32
    from jaxtyping import Int as Int
    from jaxtyping import Shaped as Shaped
    from torch import Tensor as Tensor

    HostArray = np.ndarray
else:
    # Shape and dtype alone are checked: neither jax nor torch need be imported.
    Array = HostArray = Tensor = Any
    if "jaxtyping" in sys.modules:
        from jaxtyping import Bool, Float, Float32, Int, Shaped
    else:
        # Nobody checks, and the import takes half as long as ``tpuport --help``.
        class _Unchecked:
            def __class_getitem__(cls, of: tuple[Any, str]) -> Any:
                return Any

        Bool = Float = Float32 = Int = Shaped = _Unchecked


def dtype_name(dtype: Any) -> str:
    """``"float32"`` for ``torch.float32``, ``np.float32`` and the like."""
    return str(dtype).removeprefix("torch.").removeprefix("jax.numpy.")


def torch_dtype(name: str) -> torch.dtype:
    import torch

    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def jax_dtype(name: str) -> Any:
    """The NumPy-compatible dtype of that name, bfloat16 included."""
    import jax.numpy as jnp

    return jnp.dtype(name)


def to_numpy(value: Any) -> np.ndarray:
    """A host array of a torch tensor, JAX array or NumPy array; bfloat16 stays.

    int64 becomes int32, since JAX runs with 32-bit integers here; a value that does not
    fit raises OverflowError rather than wrapping.
    """
    import ml_dtypes
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        if value.dtype == torch.bfloat16:
            return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        array = value.numpy()
    else:
        array = np.asarray(value)
    if array.dtype == np.int64:
        narrow = array.astype(np.int32)
        if not np.array_equal(narrow, array):
            raise OverflowError(
                f"int64 values outside int32: {array.min()} .. {array.max()}"
            )
        return narrow
    if array.dtype == np.float64:
        return array.astype(np.float32)
    return array


def array_dtype(tensor: torch.Tensor) -> Any:
    """The dtype of what :func:`to_numpy` makes of ``tensor``; no data is read."""
    narrowed = {"int64": "int32", "float64": "float32"}
    name = dtype_name(tensor.dtype)
    return jax_dtype(narrowed.get(name, name))


def to_torch(value: Any) -> torch.Tensor:
    """A torch tensor on the host holding a copy of a JAX or NumPy array."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    array = np.array(value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass: NaN is the extreme of all."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(extreme) for extreme in tensor.aminmax())
