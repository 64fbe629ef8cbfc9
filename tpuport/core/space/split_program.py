"""A traced forward that runs on each device's part of the picture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core.mesh.spatial_split import VIDEOS, HaloError
from tpuport.core.space.factors import Dims, MixedError, has_split, whole, whole_of
from tpuport.core.space.locality import Locality, Mixed
from tpuport.core.space.pictures import Parts, Pictures, Shape, may_be_picture, ways
from tpuport.core.tracing.runtime import Runtime
from tpuport.errors import PluginError

Call = Callable[[Mapping[str, Any], list[Any]], list[Any]]
"""``call(weights, arrays) -> arrays``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCall:
    """A program of whole arrays, in which each device has its part of the picture.

    Attributes:
        call: takes and returns pictures with phantom rows and columns.
        inputs: shapes and places of the arrays, phantoms included.
        places: of the results.
        shapes: of the results, without phantoms.
        told: why some devices have no part of their own, or empty.
    """

    call: Call
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    places: tuple[NamedSharding, ...]
    shapes: tuple[Shape, ...]
    told: str


@dataclass(frozen=True, slots=True)
class SplitTracing:
    """Traces a program on a device's part of the picture.

    Attributes:
        name: for messages.
        run: on the arrays of one device; tracing finds the split in ``runtime``.
        runtime: has a mesh.
        weights: shapes; whole on every device.
        arrays: shapes, without phantoms.
        pictures: those among ``arrays``.
    """

    name: str
    run: Call
    runtime: Runtime
    weights: Mapping[str, Any]
    arrays: Sequence[jax.ShapeDtypeStruct]
    pictures: Pictures

    def split(self) -> SplitCall:
        """The program, split the best way that its halos allow.

        Raises:
            PluginError: an operation is not local in the picture.
        """
        devices = self.devices
        jaxpr = self.trace(Parts.whole(self.pictures, len(devices)))
        shapes = tuple(aval.shape for aval in jaxpr.out_avals)
        made = [aval.shape for aval in jaxpr.out_avals if may_be_picture(aval)]
        for parts in ways(self.pictures, made, devices, self.by_video(shapes)):
            # The last trace tells what the results are put together from.
            with contextlib.suppress(HaloError):
                return self.joined(self.trace(parts), parts, shapes)
        raise AssertionError("a picture that is whole needs no neighbours")

    @property
    def devices(self) -> list[jax.Device]:
        """Those of the mesh, in its order."""
        assert self.runtime.mesh is not None
        return list(self.runtime.mesh.devices.flat)

    def by_video(self, made: Sequence[Shape]) -> bool:
        """Whether all that belongs to a video is a picture, as inputs and results."""
        videos = self.pictures.videos
        for i, one in enumerate(self.arrays):
            first = one.shape[:1] == (videos,)
            if first != (i in self.pictures.places):
                return False
        return all(shape[:1] == (videos,) for shape in made)

    def trace(self, parts: Parts) -> Any:
        """The program of one device."""
        local = [
            jax.ShapeDtypeStruct(
                parts.local(one.shape) if i in self.pictures.places else one.shape,
                one.dtype,
            )
            for i, one in enumerate(self.arrays)
        ]
        weights = {
            name: jax.ShapeDtypeStruct(one.shape, one.dtype)
            for name, one in self.weights.items()
        }
        self.runtime.records.clear()
        self.runtime.convolutions.clear()
        mesh = parts.mesh(self.devices)
        env = list(mesh.shape.items())
        manual = mesh.abstract_mesh.update_axis_types(
            dict.fromkeys(mesh.axis_names, jax.sharding.AxisType.Manual)
        )

        def on_device(weights: Any, arrays: Any) -> Any:
            with self.runtime.split(parts.space):
                return self.run(weights, arrays)

        # As within shard_map: kernels ask for the kind of device.
        with jax.sharding.use_abstract_mesh(manual):
            return jax.make_jaxpr(on_device, axis_env=env)(weights, local)

    def joined(self, jaxpr: Any, parts: Parts, shapes: tuple[Shape, ...]) -> SplitCall:
        """The program of whole arrays."""
        mesh = parts.mesh(self.devices)
        locality = Locality(space=parts.space)
        count = len(jaxpr.in_avals) - len(self.arrays)
        given: list[Any] = [whole(aval.shape) for aval in jaxpr.in_avals]
        takes, inputs = [], []
        for i, one in enumerate(self.arrays):
            spec, shape = PartitionSpec(), one.shape
            if i in self.pictures.places:
                dims = locality.picture(jaxpr.in_avals[count + i].shape)
                given[count + i] = dims
                spec, shape = _spec(dims, parts, True), parts.padded(one.shape)
            takes.append(spec)
            sharding = NamedSharding(mesh, spec)
            inputs.append(jax.ShapeDtypeStruct(shape, one.dtype, sharding=sharding))
        gives = [
            self._result(found, aval.shape, shape, parts)
            for found, aval, shape in zip(
                locality.results(jaxpr.jaxpr, given),
                jaxpr.out_avals,
                shapes,
                strict=True,
            )
        ]
        function = jaxpr_as_fun(jaxpr)
        names = {key: PartitionSpec() for key in self.weights}

        def on_device(weights: Any, arrays: Any) -> list[Any]:
            return list(function(*jax.tree.leaves((weights, arrays))))

        inner = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(names, takes),
            out_specs=gives,
            check_vma=False,
        )

        def call(weights: Mapping[str, Any], arrays: list[Any]) -> list[Any]:
            made: list[Any] = inner(dict(weights), list(arrays))
            return made

        told, size = "", f"{self.pictures.rows} x {self.pictures.columns}"
        if parts.copies == len(self.devices) > 1:
            told = f"a picture of {size} stays whole on every device: it has no parts "
            told += "that become parts of the results"
        elif parts.copies > 1:
            count = len(self.devices) // parts.copies
            told = f"a picture of {size} has {count} parts, fewer than there are "
            told += "devices"
        return SplitCall(
            call=call,
            inputs=tuple(inputs),
            places=tuple(NamedSharding(mesh, spec) for spec in gives),
            shapes=shapes,
            told=told,
        )

    def _result(
        self, found: Dims | Mixed, local: Shape, real: Shape, parts: Parts
    ) -> PartitionSpec:
        """Where a result goes.

        Args:
            local: its shape on a device.
            real: its shape, as one device would make it.
        """
        if isinstance(found, Mixed):
            raise self._refused(found.why)
        by_video = local[:1] != real[:1]
        sides = {side.axis: side for side in (parts.space.rows, parts.space.columns)}
        got = list(local)
        if by_video:
            got[0] *= parts.split.videos
        for at, dim in enumerate(found):
            if has_split(dim):
                if len(dim) > 1 or dim[0].border:
                    raise self._refused(
                        f"dim {at} of a result is not {dim[0].kind} alone"
                    )
                try:
                    got[at] = whole_of(sides[dim[0].kind], local[at])
                except MixedError as error:
                    raise self._refused(str(error)) from None
        if tuple(got) != real:
            raise self._refused(
                f"the parts of a result make {got}, where upstream makes {[*real]}"
            )
        return _spec(found, parts, by_video)

    def _refused(self, why: str) -> PluginError:
        return PluginError(
            f'{self.name} has split="space", and does what is not local in a picture: '
            f"{why}. Patch the line, or leave split out of the plugin's Module"
        )


def _spec(dims: Dims, parts: Parts, by_video: bool) -> PartitionSpec:
    axes = [dim[0].kind if has_split(dim) else None for dim in dims]
    if by_video and parts.split.videos > 1 and axes:
        axes[0] = VIDEOS
    return PartitionSpec(*axes)
