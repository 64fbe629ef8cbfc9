"""Bytes and FLOPs of single instructions, from their shapes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from tpuport.core.planning.hlo import Instruction

_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,]*)\](\{[^}]*\})?")
_TILE = re.compile(r"T\((\d+),(\d+)\)")


def convolution_flops(
    instruction: Instruction, siblings: Mapping[str, Instruction]
) -> float:
    """Multiplications and additions of a ``dot`` or ``convolution``.

    A ``dot`` multiplies its contracted dims; a convolution each output by all of the
    kernel but its output features.
    """
    operands = [siblings[n] for n in instruction.operands if n in siblings]
    if len(operands) < 2 or not instruction.arrays:
        return 0.0
    out = math.prod(instruction.arrays[0].shape)
    left, right = operands[0].arrays[0].shape, operands[1].arrays[0].shape
    if instruction.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = [int(d) for d in found[1].split(",") if d] if found else []
        return 2.0 * out * math.prod(left[d] for d in dims)
    labels = re.search(r"dim_labels=\w+_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    features = right[labels[1].index("o")]
    # A batched product is written as a convolution over a window that is mostly
    # padding; its batch dim is not multiplied twice.
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    kernel = math.prod(right) / features
    if window and "lhs_dilate" in window[1]:
        sizes = re.search(r"size=([\dx]+)", window[1])
        if sizes:
            kernel /= math.prod(int(s) for s in sizes[1].split("x"))
    return 2.0 * out * kernel


def transfer_bytes(instruction: Instruction, size: float) -> float:
    """Of a copy between memories: its smaller array, once."""
    arrays = [a.bytes for a in instruction.arrays if len(a.shape)]
    return float(min(arrays)) if arrays else size


def hbm_bytes(shape: str) -> float:
    """Of arrays that lie in HBM, with the padding of their tiles.

    ``S(n)`` in a layout names another memory.
    """
    total = 0.0
    for dtype, sizes, layout in _ARRAY.findall(shape):
        if "S(" in layout or not sizes:  # scalars are in the core's own memory
            continue
        dims = [int(s) for s in sizes.split(",") if s]
        order = [int(d) for d in re.findall(r"\d+", layout.split(":")[0])]
        tile = _TILE.search(layout)
        if tile and len(order) >= 2:
            for dim, part in ((order[0], int(tile[2])), (order[1], int(tile[1]))):
                dims[dim] = math.ceil(dims[dim] / part) * part
        bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or ["0"])[0])
        total += math.prod(dims) * bits / 8
    return total
