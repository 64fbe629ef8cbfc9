"""Model FLOPs: what the mathematics of a program asks for, on all devices together.

Counted from the traced program, before anything is padded, split or repeated for a
mesh: matrix products and convolutions where they stand, attention kernels by their
call's lengths, other kernels by what they say of themselves. Elementwise work is not
counted, as is usual for a utilisation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import jaxprs_in_params

from tpuport.core.tracing.context import AttentionRecord

#: How the names of kernels begin whose FLOPs are products, and of those without any.
PRODUCTS = ("tpuport_conv", "tpuport_product")
ELEMENTWISE = (
    "tpuport_moments",
    "tpuport_norm",
    "tpuport_norm_heads",
    "tpuport_norm_tokens",
    "tpuport_sides",
)
#: The implementation that runs as a kernel; the others are products in the trace.
KERNEL = "splash"


def model_flops(jaxpr: Any, records: Sequence[AttentionRecord]) -> float:
    """Multiplications and additions of one call of a traced program.

    Args:
        jaxpr: ``traced.jaxpr``.
        records: what its attention calls run as.
    """
    kernels = [r for r in records if r.implementation == KERNEL]
    return _walk(jaxpr.jaxpr, 1.0, kernels)


def attention_flops(record: AttentionRecord) -> float:
    """FLOPs of an attention call: two products of every query with every key seen."""
    batch, heads, queries, width = record.query
    keys = record.key[2]
    seen = float(queries) * keys
    if record.window is not None:
        left, right = record.window
        seen = queries * min(float(keys), left + right + 1.0)
    elif record.causal:
        seen /= 2
    elif record.frame_tokens:
        frames = queries // record.frame_tokens
        seen *= (frames + 1) / (2 * frames)
    return 4.0 * batch * heads * seen * width


def _walk(
    jaxpr: Any, times: float, kernels: Sequence[AttentionRecord], parts: int = 1
) -> float:
    """``parts`` is in how many different parts the jaxpr computes its result."""
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            total += times * parts * _dot(eqn)
        elif name == "conv_general_dilated":
            total += times * parts * _convolution(eqn)
        elif name == "pallas_call":
            kernel = str(eqn.params["name"])
            if kernel in PRODUCTS:
                total += times * parts * float(eqn.params["cost_estimate"].flops)
            elif not kernel.startswith(ELEMENTWISE):
                # Its lengths are those of all devices together.
                total += times * _kernel_flops(eqn, kernels, parts)
        else:
            inside = parts * (_parts(eqn) if name == "shard_map" else 1)
            often = times * (eqn.params["length"] if name == "scan" else 1)
            inner = jaxprs_in_params(eqn.params)
            found = [_walk(each, often, kernels, inside) for each in inner]
            total += max(found) if name == "cond" else sum(found)
    return total


def _parts(eqn: Any) -> int:
    """In how many different parts a ``shard_map`` computes its result."""
    sizes = dict(eqn.params["mesh"].shape)
    axes = {
        axis
        for spec in eqn.params["out_specs"]
        for entry in spec
        for axis in (entry if isinstance(entry, tuple) else (entry,))
        if axis is not None
    }
    return math.prod(sizes[axis] for axis in axes)


def _dot(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    out = math.prod(eqn.outvars[0].aval.shape)
    return 2.0 * out * math.prod(left[d] for d in contracted)


def _convolution(eqn: Any) -> float:
    kernel = eqn.invars[1].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    out = math.prod(eqn.outvars[0].aval.shape)
    return 2.0 * out * math.prod(kernel) / features


def _kernel_flops(eqn: Any, records: Sequence[AttentionRecord], parts: int) -> float:
    """FLOPs of the record that fits a kernel's operands best: operands are padded.

    A program has few different attention calls, of very different sizes. The operands
    are those of a device, of which ``parts`` compute different parts.
    """
    if not records:
        return 0.0
    size = sum(math.prod(v.aval.shape) for v in eqn.invars if v.aval.ndim > 3)
    size *= parts

    def misfit(record: AttentionRecord) -> float:
        both = math.prod(record.query) + 2 * math.prod(record.key)
        return abs(math.log(max(size, 1) / both))

    return attention_flops(min(records, key=misfit))
