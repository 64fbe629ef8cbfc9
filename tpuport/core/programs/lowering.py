"""A stage's program as jax lowers it: for the devices here, or for absent ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core.mesh.compiler_flags import flags_for
from tpuport.core.mesh.spatial_split import (
    SpatialLayout,
    padded,
    partition,
    spatial_mesh,
    split_of,
)
from tpuport.core.programs.components import Loaded
from tpuport.core.spec.stage import Program
from tpuport.core.tracing.runtime import Runtime


def trace(
    stage: str,
    name: str,
    program: Program,
    loaded: Loaded,
    args: tuple[Any, Any, Any],
) -> jax.stages.Traced:
    """Trace one program of a stage.

    ``generate`` compiles what this returns for the devices it runs on, ``plan`` and
    ``compile`` for the devices of a topology: what is planned is what runs. It carries
    the compiler's flags for those devices along; see :func:`flags_for`.

    Args:
        stage: the name of the stage.
        name: of the program in the stage.
        program: what to lower.
        loaded: its component; the weights may be arrays or ``ShapeDtypeStruct``.
        args: carry, constants and inputs, as arrays or ``ShapeDtypeStruct`` that say
            how they are placed.
    """

    flags = flags_for(loaded.replicated.mesh.devices.flat[0], stage)

    def run(weights: Any, carry: Any, constants: Any, inputs: Any) -> tuple[Any, Any]:
        return program.fn(loaded.ported.bind(weights), carry, constants, inputs)

    run, places = placed(program, run, loaded, args)
    run.__name__ = f"{stage}_{name}"
    jitted = jax.jit(
        run,
        donate_argnums=(1,) if program.donate else (),
        out_shardings=places,
        compiler_options=flags.options or None,
    )
    return jitted.trace(loaded.weights, *args)


def placed(
    program: Program, run: Any, loaded: Loaded, args: tuple[Any, Any, Any]
) -> tuple[Any, Any]:
    """The program as it is compiled, and where its carry and its output are.

    Args:
        run: ``run(weights, carry, constants, inputs)``; it may be ``None`` where only
            the places are asked for.
    """
    whole = (loaded.replicated, loaded.replicated)
    if program.space is None:
        return run, whole
    runtime = loaded.ported.runtime
    # On one TPU too, so that kernels see what chip they are for.
    if loaded.replicated.mesh.size == 1 and runtime.platform != "tpu":
        return run, whole
    return spread(run, runtime, program.space, args)


def results(
    program: Program, loaded: Loaded, args: tuple[Any, Any, Any], info: Any
) -> tuple[Any, Any]:
    """Shapes and places of the carry and the output, for the programs that follow.

    Args:
        info: shapes and dtypes, as a traced or a compiled program tells them.
    """
    _, places = placed(program, None, loaded, args)

    def struct(place: Any, leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

    out: tuple[Any, Any] = jax.tree.map(
        lambda place, part: jax.tree.map(functools.partial(struct, place), part),
        places,
        tuple(info),
    )
    return out


def lower(
    stage: str,
    name: str,
    program: Program,
    loaded: Loaded,
    args: tuple[Any, Any, Any],
) -> jax.stages.Lowered:
    """:func:`trace`, and lower what it gives."""
    return trace(stage, name, program, loaded, args).lower()


def spread(
    run: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
    runtime: Runtime,
    layout: SpatialLayout,
    args: tuple[Any, Any, Any],
) -> tuple[Callable[[Any, Any, Any, Any], tuple[Any, Any]], tuple[Any, Any]]:
    """A program that runs on its part of the picture, as one of whole arrays.

    Args:
        run: ``run(weights, carry, constants, inputs) -> (carry, output)``.
        runtime: where it is traced; tracing finds the :class:`Space` there.
        layout: of its arrays.
        args: carry, constants and inputs, or ``ShapeDtypeStruct`` in their place.

    Returns:
        the program, and the shardings of its carry and its output as prefixes of their
        trees.
    """

    assert runtime.mesh is not None
    split, space = split_of(layout, runtime.mesh, args[2])
    mesh = spatial_mesh(runtime.mesh, split)
    gives = (partition(layout.carry), jax.tree.map(partition, layout.output))
    takes = (
        PartitionSpec(),
        partition(layout.carry),
        PartitionSpec(),
        {name: partition(layout.inputs[name]) for name in args[2]},
    )

    def on_device(
        weights: Any, carry: Any, constants: Any, inputs: Any
    ) -> tuple[Any, Any]:
        with runtime.split(space):
            return run(weights, carry, constants, inputs)

    def whole(weights: Any, carry: Any, constants: Any, inputs: Any) -> tuple[Any, Any]:
        inputs = {k: padded(space, layout.inputs[k], x) for k, x in inputs.items()}
        inner = jax.shard_map(
            on_device, mesh=mesh, in_specs=takes, out_specs=gives, check_vma=False
        )
        out: tuple[Any, Any] = inner(weights, carry, constants, inputs)
        return out

    places = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        gives,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    return whole, places
