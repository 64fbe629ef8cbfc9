"""A stage's program as jax lowers it: for the devices here, or for absent ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tpuport.core.libtpu_flags import flags_for
from tpuport.core.spatial import spread

if TYPE_CHECKING:
    import jax

    from tpuport.core.components import Loaded
    from tpuport.core.spec import Program


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
    import jax

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


def lower(
    stage: str,
    name: str,
    program: Program,
    loaded: Loaded,
    args: tuple[Any, Any, Any],
) -> jax.stages.Lowered:
    """:func:`trace`, and lower what it gives."""
    return trace(stage, name, program, loaded, args).lower()
