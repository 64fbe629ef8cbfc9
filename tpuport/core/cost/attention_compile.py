"""Compiles one attention call for a TPU that is not there: a process of its own.

``python -m tpuport.core.cost.attention_compile`` reads an :class:`AttentionCase` as
JSON from stdin and answers with one line of JSON. libtpu reads its flags once in a
process, so whoever wants a dump of one kernel needs a fresh one; see
:mod:`tpuport.core.cost.attention_cycles`, which starts it.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokamax._src.ops.experimental.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)

from tpuport.core.cost.attention_case import AttentionCase
from tpuport.core.mesh.slices import TOPOLOGY_NAMES, parse_topology, topology_devices
from tpuport.errors import TpuportError
from tpuport.kernels.attention.jax_splash import BlockSizes, jax_splash_attention
from tpuport.kernels.attention.splash import splash_attention
from tpuport.kernels.attention.splash_blocks import SplashBlocks
from tpuport.kernels.padding import pad_dim, round_up

_KERNEL = re.compile(
    r'%([\w.\-]+) = [^\n]*custom-call\([^\n]*custom_call_target="tpu_custom_call"'
)
_ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')


def main() -> int:
    """Compile the case on stdin; one JSON object on stdout either way."""
    case = AttentionCase.from_dict(json.load(sys.stdin))
    try:
        answer = compile_case(case)
    except (TpuportError, NotImplementedError, ValueError, ImportError) as error:
        answer = {"error": type(error).__name__, "text": str(error)}
    except Exception as error:  # the compiler's own refusals
        answer = {"error": type(error).__name__, "text": str(error)[:4000]}
    print(json.dumps(answer))
    return 0


def compile_case(case: AttentionCase) -> dict[str, Any]:
    """Compile a case for one device of its chip.

    Returns:
        ``grids`` (of the Pallas kernels, whole: before two cores share
        one), ``kernels`` (their names in the compiled program), ``other_cycles`` (the
        compiler's estimate for all else), ``compile_seconds``.
    """

    topology = next(
        parse_topology(name) for name in TOPOLOGY_NAMES if name.startswith(case.chip)
    )
    devices = topology_devices(topology)
    mesh = Mesh(np.array(devices[:1]), ("one",))
    whole = NamedSharding(mesh, PartitionSpec())

    def array(shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=whole)

    kv_heads = case.kv_heads or case.heads
    dtype = jnp.dtype(case.dtype)
    q = array((case.batch, case.heads, case.q_len, case.head_dim), dtype)
    k = array((case.batch, kv_heads, case.kv_len, case.head_dim), dtype)
    arguments = [q, k, k]
    if case.has_lengths:
        arguments.append(array((case.batch,), jnp.int32))
    run = _BUILD[case.implementation](case)
    started = time.perf_counter()
    # Kernels that ask what chip they are for are told by the mesh, not by this machine.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(run).trace(*arguments)
        lowered = traced.lower()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    text = compiled.as_text()
    return {
        "grids": [list(grid) for grid in _grids(traced.jaxpr.jaxpr)],
        "kernels": _KERNEL.findall(text),
        "other_cycles": sum(map(int, _ESTIMATE.findall(text))),
        "compile_seconds": seconds,
    }


def _grids(jaxpr: Any) -> Iterator[tuple[int, ...]]:
    """The grids of all Pallas kernels in a program, those of every branch."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield tuple(equation.params["grid_mapping"].grid)
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _grids(inner)


def _jax(case: AttentionCase) -> Callable[..., Any]:

    if case.window is not None or case.k_smooth:
        raise NotImplementedError("jax's splash takes neither window nor k_smooth here")
    blocks = BlockSizes(**_sizes(case))

    def run(q: Any, k: Any, v: Any, lengths: Any = None) -> Any:
        return jax_splash_attention(
            q, k, v, is_causal=case.is_causal, kv_lengths=lengths, blocks=blocks
        )

    return run


def _tokamax(case: AttentionCase) -> Callable[..., Any]:
    """Its kernel on padded lengths; the padding is not masked, which flatters it."""

    if case.window is not None or case.k_smooth or case.is_causal or case.has_lengths:
        raise NotImplementedError("of tokamax only plain full attention is costed")
    sizes = _sizes(case)
    q_len, kv_len = round_up(case.q_len, sizes["q"]), round_up(case.kv_len, sizes["kv"])
    kernel = splash_attention_kernel.make_splash_mha_single_device(
        splash_attention_mask.FullMask((q_len, kv_len)),
        config=splash_attention_kernel.SplashConfig(
            block_q=sizes["q"],
            block_kv=sizes["kv"],
            block_kv_compute=sizes["kv_compute"],
            use_base2_exp=True,
        ),
    )

    def run(q: Any, k: Any, v: Any) -> Any:
        q = pad_dim(q * case.head_dim**-0.5, 2, q_len)
        k, v = pad_dim(k, 2, kv_len), pad_dim(v, 2, kv_len)
        return jax.vmap(kernel)(q, k, v)[:, :, : case.q_len]

    return run


def _tpuport(case: AttentionCase) -> Callable[..., Any]:

    blocks = SplashBlocks(**_sizes(case))

    def run(q: Any, k: Any, v: Any, lengths: Any = None) -> Any:
        return splash_attention(
            q,
            k,
            v,
            is_causal=case.is_causal,
            window=case.window,
            k_smooth=case.k_smooth,
            kv_lengths=lengths,
            blocks=blocks,
            chip=case.chip,
        )

    return run


def _sizes(case: AttentionCase) -> dict[str, int]:
    if case.blocks is None:
        raise ValueError("the blocks of a case are chosen before it is compiled")
    return asdict(case.blocks)


_BUILD: dict[str, Callable[[AttentionCase], Callable[..., Any]]] = {
    "tpuport": _tpuport,
    "jax": _jax,
    "tokamax": _tokamax,
}


if __name__ == "__main__":
    sys.exit(main())
