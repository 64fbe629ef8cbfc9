"""A stage's program as jax lowers it: for the devices here, or for absent ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core.mesh.compiler_flags import ChosenFlags, flags_for
from tpuport.core.mesh.spatial_split import (
    SpatialLayout,
    padded,
    partition,
    spatial_mesh,
    split_of,
)
from tpuport.core.programs.components import Loaded
from tpuport.core.spec.stage import Program
from tpuport.core.tracing.convolution_notes import counted
from tpuport.core.tracing.runtime import Runtime

Run = Callable[[Any, Any, Any, Any], tuple[Any, Any]]
"""``run(weights, carry, constants, inputs) -> (carry, output)``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """What tracing a program told, kept beside its executable.

    Attributes:
        attention: what its attention calls run as.
        patches: which patches were applied.
        convolutions: what its convolutions run as.
    """

    attention: tuple[dict[str, Any], ...] = ()
    patches: tuple[dict[str, Any], ...] = ()
    convolutions: tuple[dict[str, Any], ...] = ()

    @classmethod
    def of(cls, runtime: Runtime) -> Traced:
        """What the runtime tells of the program that :meth:`Traceable.trace` traced."""
        return cls(
            attention=tuple(map(asdict, runtime.records)),
            patches=tuple(map(asdict, runtime.patch_states)),
            convolutions=tuple(map(asdict, counted(runtime.convolutions))),
        )

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Traced:
        """From a header; lists are tuples again."""
        return cls(**{name: _tuples(data[name]) for name in cls.__dataclass_fields__})


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples they were."""
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value


@dataclass(frozen=True, kw_only=True, eq=False)
class Traceable:
    """A program of a stage with its arguments: what is traced, keyed and compiled.

    Attributes:
        stage: the name of the stage.
        name: of the program in the stage.
        program: what the stage declares.
        loaded: its component; the weights may be arrays or ``ShapeDtypeStruct``.
        args: carry, constants and inputs, as arrays or ``ShapeDtypeStruct`` that say
            how they are placed.
    """

    stage: str
    name: str
    program: Program
    loaded: Loaded
    args: tuple[Any, Any, Any]

    @property
    def label(self) -> str:
        """For people: ``denoise/step``."""
        return f"{self.stage}/{self.name}"

    @functools.cached_property
    def signature(self) -> Any:
        """What tells the programs of a run apart: names, structure, shapes, dtypes."""
        leaves, tree = jax.tree.flatten(self.args)
        shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in leaves)
        return self.stage, self.name, tree, shapes

    @property
    def flags(self) -> ChosenFlags:
        """What tpuport sets of the compiler's flags for these devices."""
        return flags_for(self.loaded.replicated.mesh.devices.flat[0], self.stage)

    def split(self) -> tuple[Any, tuple[Any, Any]]:
        """The program on whole arrays, and where its carry and its output are."""

        def run(
            weights: Any, carry: Any, constants: Any, inputs: Any
        ) -> tuple[Any, Any]:
            model = self.loaded.ported.bind(weights)
            return self.program.fn(model, carry, constants, inputs)

        replicated, runtime = self.loaded.replicated, self.loaded.ported.runtime
        # On one TPU too, so that kernels see what chip they are for.
        alone = replicated.mesh.size == 1 and runtime.platform != "tpu"
        if self.program.space is None or alone:
            return run, (replicated, replicated)
        return spread(run, runtime, self.program.space, self.args)

    def trace(self) -> jax.stages.Traced:
        """Trace the program.

        ``generate`` compiles what this returns for the devices it runs on, ``plan`` and
        ``compile`` for the devices of a topology: what is planned is what runs. The
        result carries :attr:`flags` along. Afterwards the component's runtime holds the
        records of this program.
        """
        run, places = self.split()
        run.__name__ = f"{self.stage}_{self.name}"
        jitted = jax.jit(
            run,
            donate_argnums=(1,) if self.program.donate else (),
            out_shardings=places,
            compiler_options=self.flags.options or None,
        )
        self.forget_records()
        return jitted.trace(self.loaded.weights, *self.args)

    def forget_records(self) -> None:
        """Empty the runtime's records: those of an earlier program hide equal ones."""
        self.loaded.ported.runtime.records.clear()
        self.loaded.ported.runtime.convolutions.clear()

    def results(self, info: Any) -> tuple[Any, Any]:
        """Shapes and places of the carry and the output, for the calls that follow.

        Args:
            info: shapes and dtypes, as a traced or a compiled program tells them.
        """

        def struct(place: Any, leaf: Any) -> Any:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        _, places = self.split()
        out: tuple[Any, Any] = jax.tree.map(
            lambda place, part: jax.tree.map(functools.partial(struct, place), part),
            places,
            tuple(info),
        )
        return out


def spread(
    run: Run, runtime: Runtime, layout: SpatialLayout, args: tuple[Any, Any, Any]
) -> tuple[Run, tuple[Any, Any]]:
    """A program that runs on its part of the picture, as one of whole arrays.

    Args:
        run: the program on the arrays of one device.
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
