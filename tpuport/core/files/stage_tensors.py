"""The tensors that one stage hands to the next: what they must be, and their file."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tpuport.core.arrays import dtype_name
from tpuport.core.files.atomic import cannot_write, replacing
from tpuport.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """What one tensor of a stage's file must be.

    Attributes:
        name: its key in the file.
        shape: one entry per dimension. An int is that size; a string is a named size,
            such as "N", that must agree in all tensors of the file.
        dtypes: the allowed torch dtype names, such as "float32" or "bfloat16".
        optional: the file may lack it.
        note: what the tensor is, for people.
        role: ``"prompt"`` or ``"negative"`` for what may be given in place of prompts
            or negative prompts; else empty.
    """

    name: str
    shape: tuple[int | str, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    note: str = ""
    role: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            raise UsageError("a TensorSpec needs a name")
        if isinstance(self.dtypes, str) or not self.dtypes:
            raise UsageError(
                f"TensorSpec {self.name!r}: dtypes must be a tuple of one or more"
                f" dtype names, not {self.dtypes!r}"
            )
        for size in self.shape:
            if isinstance(size, int) and size < 0:
                raise UsageError(f"TensorSpec {self.name!r}: size {size} is negative")


def check_tensors(
    file: Path,
    tensors: Mapping[str, torch.Tensor],
    specs: Sequence[TensorSpec],
    known_sizes: Mapping[str, int] | None = None,
) -> None:
    """Check that ``tensors`` are those of ``specs``, no more and no fewer.

    Args:
        file: named in the message.
        known_sizes: named sizes that are known beforehand.

    Raises:
        ArtifactError: a tensor is missing or unexpected, has a wrong shape or dtype, or
            holds NaN or infinite values; or two tensors disagree on a named size.
    """
    known = {spec.name: spec for spec in specs}
    required = {name for name, spec in known.items() if not spec.optional}
    if missing := sorted(required - tensors.keys()):
        raise ArtifactError(
            f"{file}: tensor {', '.join(missing)} is missing"
            f" (found: {', '.join(sorted(tensors)) or 'none'})"
        )
    if extra := sorted(tensors.keys() - known.keys()):
        raise ArtifactError(
            f"{file}: tensor {', '.join(extra)} is not expected"
            f" (expected: {', '.join(sorted(known)) or 'none'})"
        )
    sizes = {name: (size, "this run") for name, size in (known_sizes or {}).items()}
    for name, spec in known.items():
        if name not in tensors:
            continue
        found = tuple(int(size) for size in tensors[name].shape)
        dtype = dtype_name(tensors[name].dtype)
        if dtype not in spec.dtypes:
            raise ArtifactError(
                f"{file}: tensor {name} is {dtype}, not {' or '.join(spec.dtypes)}"
            )
        expected = ", ".join(str(size) for size in spec.shape)
        wrong = f"{file}: tensor {name} has shape {list(found)}, not [{expected}]"
        if len(found) != len(spec.shape):
            raise ArtifactError(wrong)
        for asked, size in zip(spec.shape, found, strict=True):
            if isinstance(asked, int):
                if size != asked:
                    raise ArtifactError(wrong)
                continue
            agreed, first = sizes.setdefault(asked, (size, f"tensor {name}"))
            if size != agreed:
                raise ArtifactError(
                    f"{wrong}: {asked} is {size} here and {agreed} in {first}"
                )
        if not all_finite(tensors[name]):
            raise ArtifactError(f"{file}: tensor {name} holds NaN or infinite values")


def all_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite, in one pass: NaN is the extreme of all."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    return all(math.isfinite(extreme) for extreme in tensor.aminmax())


def save_tensors(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    specs: Sequence[TensorSpec],
    before: Callable[[str], None],
) -> tuple[str, int]:
    """Write ``tensors`` to a safetensors file, whole or not at all, dtypes kept.

    Args:
        before: called with the sha256 of the file before the file gets its name.

    Returns:
        the sha256 and the bytes of the file.

    Raises:
        ArtifactError: the tensors are not those of ``specs`` (nothing is written), or
            the file cannot be written (what was there before still is).
    """
    import torch
    from safetensors.torch import save

    check_tensors(path, tensors, specs)
    # A copy, because safetensors refuses views and tensors that share memory.
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }
    data = save(plain)
    sha256 = hashlib.sha256(data).hexdigest()
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(data)
            before(sha256)
    except OSError as error:
        raise cannot_write(path, error) from error
    return sha256, len(data)
