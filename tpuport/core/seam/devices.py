"""The devices of a port: what is there already, and what compiles for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.mesh.compiler_flags import flags_for
from tpuport.core.mesh.mesh_arrays import readable, to_mesh
from tpuport.core.programs.jax_cache import cache_hits, lowered, persistent_cache
from tpuport.core.programs.program_key import WHOLE, module_key
from tpuport.core.reports import CompileReport
from tpuport.core.seam.device_tensors import DeviceTensor
from tpuport.core.seam.target import Target
from tpuport.core.tracing.context import AttentionRecord, ConvolutionRecord
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.file_parts import Index
from tpuport.core.weights.placement import place_weights
from tpuport.errors import UsageError


@dataclass(kw_only=True, eq=False)
class TracedProgram:
    """One program, traced for the devices.

    Attributes:
        name: of the module that is called: its component, and the path within.
        module: that one; ``None`` of arithmetic between calls.
        weights: shapes, dtypes and places of the weights.
        stages: whose flags of the compiler it takes.
        attention, convolutions: what its calls run as.
    """

    name: str
    traced: jax.stages.Traced = field(repr=False)
    stages: Sequence[str]
    module: torch.nn.Module | None = field(default=None, repr=False)
    weights: Mapping[str, Any] = field(default_factory=dict)
    attention: tuple[AttentionRecord, ...] = ()
    convolutions: tuple[ConvolutionRecord, ...] = ()


class Devices:
    """Takes tensors to the devices and back, and compiles programs.

    Args:
        target: what programs are made for.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self._known: MutableMapping[torch.Tensor, tuple[int, jax.Array]]
        self._known = WeakTensorKeyDictionary()

    def array(self, tensor: torch.Tensor, place: jax.ShapeDtypeStruct) -> jax.Array:
        """The tensor on the devices; uploaded once if nothing writes to it.

        Args:
            place: its sharding, and its shape there: a picture that is split may have
                more rows and columns than the tensor.
        """
        if isinstance(tensor, DeviceTensor):
            if (array := tensor.on_devices) is not None:
                return self._fitted(array, tuple(tensor.shape), place)
            tensor = tensor.on_host()
        if tensor.is_inference():
            return self._put(tensor, place)
        known = self._known.get(tensor)
        if known is not None and known[0] == tensor._version:
            return self._fitted(known[1], tuple(tensor.shape), place)
        array = self._put(tensor, place)
        self._known[tensor] = tensor._version, array
        return array

    def read(self, array: Any) -> torch.Tensor:
        return to_torch(readable(array))

    def moved(self, array: Any, sharding: Any) -> Any:
        """The array where it is wanted."""
        if array.sharding.is_equivalent_to(sharding, array.ndim):
            return array
        return jax.device_put(array, sharding)

    def weights(
        self,
        ported: PortedModule,
        structs: Mapping[str, Any],
        read: Callable[[str, Index], np.ndarray],
        *,
        ahead: bool,
    ) -> Mapping[str, jax.Array]:
        """A module's weights, placed; see :func:`place_weights`."""
        return place_weights(ported, structs, read, ahead=ahead)

    def jitted(
        self, function: Callable[..., Any], stages: Sequence[str], **options: Any
    ) -> Any:
        """``jax.jit`` with the flags of the compiler that stages take."""
        flags = flags_for(self.target.mesh.devices.flat[0], *stages)
        return jax.jit(function, compiler_options=flags.options or None, **options)

    def compiled(
        self, program: TracedProgram, seconds: float
    ) -> tuple[Callable[..., Any], CompileReport]:
        """What runs a program, compiled or found; ``seconds`` were spent on tracing."""
        target, (component, _, path) = self.target, program.name.partition(".")
        started, hits, built = time.perf_counter(), cache_hits(), None
        with persistent_cache(target.cache) as failures:
            run: Callable[..., Any]
            if target.built is None:
                run = program.traced.lower().compile()
            else:
                text = lowered(program.traced)
                key = module_key(
                    program.name,
                    program.module,
                    target.mesh,
                    program.weights,
                    text,
                    program.stages,
                )
                run, built = target.built.ready(key, text, target.mesh)
        return run, CompileReport(
            stage=component,
            program=path or WHOLE,
            trace_seconds=seconds,
            compile_seconds=time.perf_counter() - started,
            cached=built is not None or cache_hits() > hits,
            loaded=built is not None,
            executable=str(built.path) if built else "",
            executable_bytes=built.size if built else 0,
            remark=failures[0] if failures else "",
        )

    def _fitted(
        self, array: jax.Array, real: tuple[int, ...], place: jax.ShapeDtypeStruct
    ) -> jax.Array:
        """An array as a program takes it, with as many phantom rows and columns.

        Args:
            real: its shape without phantoms.
        """
        if array.shape == place.shape:
            found: jax.Array = self.moved(array, place.sharding)
            return found

        def fit(array: jax.Array) -> jax.Array:
            array = array[tuple(map(slice, real))]
            return jnp.pad(array, _widths(real, place.shape))

        fitted: jax.Array = jax.jit(fit, out_shardings=place.sharding)(array)
        return fitted

    def _put(self, tensor: torch.Tensor, place: jax.ShapeDtypeStruct) -> jax.Array:
        try:
            array = to_numpy(tensor)
            # A copy: JAX may share the memory of the host, and upstream writes to
            # tensors. Where a picture gets phantoms they are the copy.
            if array.shape == place.shape:
                copied = array.copy()
            else:
                copied = np.pad(array, _widths(array.shape, place.shape))
            put: jax.Array = to_mesh(copied, place.sharding)
            return put
        except OverflowError as error:
            raise UsageError(
                f"an argument {tensor.dtype} {[*tensor.shape]} has {error}; programs "
                "count in 32 bits"
            ) from None


def _widths(real: Sequence[int], padded: Sequence[int]) -> list[tuple[int, int]]:
    return [(0, m - n) for n, m in zip(real, padded, strict=True)]
