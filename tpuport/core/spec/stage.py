"""Encode, denoise, decode: what a model declares of each, and the programs in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tpuport.core.files.stage_tensors import TensorSpec
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage_work import StageContext, Tree, Work

if TYPE_CHECKING:
    from tpuport.core.mesh.spatial_split import SpatialLayout
    from tpuport.core.weights.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A pure function that a stage calls, compiled once per shape.

    Attributes:
        component: whose weights it takes.
        fn: ``fn(model, carry, constants, inputs) -> (carry, output)`` on JAX arrays;
            the model is a :class:`~tpuport.core.tracing.ported_module.BoundModule`, or
            what the component's implementation binds.
        donate: whether the carry's memory may be reused for the new carry.
        space: how its arrays are split in space over the mesh; ``fn`` then has a
            device's own part of them. ``None`` where the mesh is the model's affair.
    """

    component: str
    fn: Callable[[Any, Tree, Tree, Tree], tuple[Tree, Tree]]
    donate: bool = True
    space: SpatialLayout | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One of encode, denoise, decode.

    Attributes:
        name: of the stage.
        unit: what one call is called in progress output.
        components: the folders whose weights it may load.
        files: further folders it reads (a tokenizer, a scheduler's config).
        programs: by name.
        plan: the work of one batch.
        upstream: the same work done by plain upstream code.
        writes: the tensors of its file; the leading dim is the number of videos.
        batch_rows: how many rows the program's batch dim has, for the mesh check.
        require: raises WeightsError when ``files`` lack something.
        needs: which of ``components`` a request needs; all of them when not given.
        loads: of a component, regexes of the stored weights this stage needs, where
            that is not all of them: a decoder needs no encoder. The others are checked
            but not loaded.
        tiles: of a stage that can run in tiles: how upstream cuts the picture, in
            words, such as ``"4 x 5 tiles of up to 240 x 360 pixels"``; empty where the
            picture is one of upstream's tiles. The context has no inputs. See
            :mod:`tpuport.core.spec.tiling`.
    """

    name: str
    unit: str
    components: tuple[str, ...]
    files: tuple[str, ...] = ()
    programs: Mapping[str, Program]
    plan: Callable[[StageContext], Work]
    upstream: Callable[[StageContext], dict[str, Any]]
    writes: tuple[TensorSpec, ...]
    batch_rows: Callable[[Request], int] | None = None
    require: Callable[[Checkpoint], None] | None = None
    needs: Callable[[Request], tuple[str, ...]] | None = None
    loads: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    tiles: Callable[[StageContext], str] | None = None

    def components_for(self, request: Request | None) -> tuple[str, ...]:
        """The components that a request needs; without a request, all of them."""
        if request is None or self.needs is None:
            return self.components
        return self.needs(request)
