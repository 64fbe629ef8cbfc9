"""What a model port is made of: data and small pure functions, no devices.

A plugin hands over one :class:`ModelPort`. The session reads it; nothing here runs
anything. Importing this module, or building a port, imports neither torch nor jax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.core.enums import Blocks
from tpuport.core.spec.component import Component, Named
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Stage
from tpuport.core.spec.stage_work import Call as Call
from tpuport.core.spec.variant import Option, Variant
from tpuport.core.weights.sharding import (
    DEFAULT_LAYOUT,
    GATHERED,
    ShardingPlan,
    ShardRule,
    plan_sharding,
)
from tpuport.errors import UnknownModelError, UsageError

if TYPE_CHECKING:
    from tpuport.core.tracing.context import AttentionPolicy
    from tpuport.core.tracing.op_overrides import OpOverride
    from tpuport.core.tracing.patching import Patch
    from tpuport.core.weights.checkpoint import Checkpoint

BLOCKS = tuple(Blocks)
"""What ``--blocks`` takes; the first one is the default."""


@dataclass(frozen=True, kw_only=True)
class ModelPort:
    """Everything tpuport knows about a model.

    A field that is ``Named`` takes the object, or ``"package.module:name"`` of an
    object that needs torch or jax.

    Attributes:
        name: what ``--model`` takes.
        title: for people.
        pipelines: upstream pipeline classes whose checkpoints this form reads.
        components: by folder name.
        stages: encode, denoise, decode, in that order.
        variants: checkpoints of every form; the first one is the default without
            weights. One without a ``repo_id`` is a demo that ``make_demo`` makes.
        patches: monkey patches, applied while tracing.
        overrides: op overrides besides attention.
        attention: how attention is split over the mesh.
        options: settings only this model has.
        detect: the variant for a checkpoint that the user named no variant for: one of
            ``variants``, or one named :data:`~tpuport.core.spec.variant.CUSTOM`.
        check: raises UsageError when a request does not fit the checkpoint.
        latent_shape: of the initial noise of one batch.
        make_demo: writes the demo checkpoint of the variant of that name into an empty
            folder.
        demo_version: part of the cache key of the demo checkpoints.
        guided: whether a request runs the negative prompts as well; by its scale.
        bucket: (height, width) of a size class for an aspect ratio given as (height,
            width); needed by variants with ``resolutions``.
        aspect: (height, width) of a bucket where the user names none.
        check_variant: what of ``check`` needs no checkpoint: it is asked before one is
            looked for.
        write_processors: writes the configs of processors that go with a variant's own
            configs, such as the size of pictures that its image encoder takes, into a
            checkpoint's folder; those of the demo stand where there is none.
        form: the name of this form, where a model has several architectures.
        forms: the other forms: ports of the same name and the same variants.
        blocks: which blocks are in place; see :func:`with_blocks`.
        chosen: component -> the implementation in place, where that is another than
            upstream's class; see :func:`tpuport.core.spec.choices.with_chosen`.
    """

    name: str
    title: str
    pipelines: tuple[str, ...]
    components: Mapping[str, Component]
    stages: Named[tuple[Stage, ...]] = Named()
    variants: tuple[Variant, ...]
    patches: Named[tuple[Patch, ...]] = Named()
    overrides: Named[tuple[OpOverride, ...]] = Named()
    attention: AttentionPolicy
    options: tuple[Option, ...]
    detect: Callable[[Checkpoint], Variant]
    check: Callable[[Request, Variant, Checkpoint], None]
    latent_shape: Named[Callable[[Request, Checkpoint], tuple[int, ...]]] = Named()
    make_demo: Named[Callable[[Path, str], None]] = Named()
    demo_version: str
    guided: Callable[[Request], bool] = lambda request: request.guided
    bucket: Callable[[int, tuple[float, float]], tuple[int, int]] | None = None
    aspect: tuple[float, float] = (9, 16)
    check_variant: Callable[[Request, Variant], None] | None = None
    write_processors: Named[Callable[[Path, Variant], None] | None] = Named(None)
    form: str = ""
    forms: tuple[ModelPort, ...] = ()
    blocks: Blocks = Blocks.UPSTREAM
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_forms(self) -> tuple[ModelPort, ...]:
        """This form and the others."""
        return (self, *self.forms)

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of a checkpoint of this form that some stage may read."""
        return (*self.components, *(f for s in self.stages for f in s.files))

    @property
    def all_folders(self) -> tuple[str, ...]:
        """Those of all forms, each once."""
        return tuple(dict.fromkeys(f for form in self.all_forms for f in form.folders))

    @property
    def layouts(self) -> tuple[str, ...]:
        """The names of sharding layouts; the first is plain."""
        components = self.components.values()
        stacked = [GATHERED] if any(c.stacked for c in components) else []
        names = [n for c in components for n in c.layouts]
        return (DEFAULT_LAYOUT, *stacked, *dict.fromkeys(names))

    def rules(self, name: str, layout: str) -> tuple[ShardRule, ...]:
        """The sharding rules of a component in a layout.

        Raises:
            UsageError: no component has the layout.
        """
        if layout not in self.layouts:
            raise UsageError(
                f"sharding {layout!r}: {self.name} has {', '.join(self.layouts)}"
            )
        component = self.components[name]
        return component.layouts.get(layout, component.sharding)

    def sharding_plan(
        self,
        name: str,
        layout: str,
        weights: Mapping[str, Any],
        mesh_shape: Mapping[str, int],
    ) -> ShardingPlan:
        """Where the weights of a component go in a layout, and what the layout costs.

        Args:
            name: of the component.
            layout: one of ``layouts``.
            weights: name -> tensor or ``WeightInfo``.
            mesh_shape: axis -> size.

        Raises:
            ShardingError: rules and weights disagree.
            UsageError: the model has no such layout.
        """
        rules = self.rules(name, layout)
        plan = plan_sharding(rules, weights, mesh_shape, component=name)
        component = self.components[name]
        if layout not in component.layouts:
            return replace(plan, layout=layout) if layout == GATHERED else plan
        default = plan_sharding(component.sharding, weights, mesh_shape, component=name)
        extra = plan.bytes_per_device - default.bytes_per_device
        return replace(plan, layout=layout, extra_bytes_per_device=extra)

    def form_of(self, variant: Variant) -> ModelPort:
        """The form that a variant is a checkpoint of."""
        for port in self.all_forms:
            if port.form == variant.form:
                return port
        raise KeyError(variant.form)

    def form_of_pipeline(self, pipeline: str) -> ModelPort:
        """The form that reads checkpoints of an upstream pipeline class."""
        for port in self.all_forms:
            if pipeline in port.pipelines:
                return port
        raise KeyError(pipeline)

    def form_of_module(self, kind: type) -> tuple[ModelPort, str]:
        """The form with a component of an upstream class, and the component's name.

        Raises:
            UsageError: there is none; the message lists the classes.
        """
        classes: dict[str, tuple[ModelPort, str]] = {}
        for form in self.all_forms:
            for name, component in form.components.items():
                upstream = component.class_path.partition(":")[2]
                classes.setdefault(upstream, (form, name))
        for cls in kind.__mro__:
            if cls.__name__ in classes:
                return classes[cls.__name__]
        raise UsageError(
            f"model {self.name!r} has no component of class {kind.__name__}; it has "
            + ", ".join(classes)
        )

    @property
    def denoisers(self) -> frozenset[str]:
        """The components that the stage ``denoise`` runs."""
        programs = self.stage("denoise").programs.values()
        return frozenset(program.component for program in programs)

    def stage(self, name: str) -> Stage:
        """The stage of that name."""
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise KeyError(name)

    def variant(self, name: str) -> Variant:
        """The variant of that name.

        Raises:
            UnknownModelError: there is none; the message lists those there are.
        """
        for variant in self.variants:
            if variant.name == name:
                return variant
        raise UnknownModelError(
            f"model {self.name!r} has no variant {name!r}; it has "
            + ", ".join(v.name for v in self.variants)
        )


def with_blocks(port: ModelPort, blocks: str) -> ModelPort:
    """The port with its native blocks in place, or as it is for ``"upstream"``.

    A form without native blocks stays as it is, and its ``blocks`` says so.

    Raises:
        UsageError: ``blocks`` is neither.
    """
    if blocks not in BLOCKS:
        raise UsageError(f"blocks {blocks!r}: choose from {', '.join(BLOCKS)}")
    blocks = Blocks(blocks)
    if blocks == port.blocks:
        return port
    if port.blocks != Blocks.UPSTREAM:
        raise UsageError(f"{port.name} already has {port.blocks} blocks in place")
    natives = {n: c.native for n, c in port.components.items() if c.native}
    components = dict(port.components)
    for name, native in natives.items():
        component = components[name]
        components[name] = replace(
            component,
            split=native.split or component.split,
            transforms=native.transforms,
        )
    added = dict.fromkeys(p for native in natives.values() for p in native.patches)
    targets = {patch.target for patch in added}
    kept = [patch for patch in port.patches if patch.target not in targets]
    return replace(
        port,
        components=components,
        patches=(*kept, *added),
        blocks=blocks if natives else port.blocks,
        forms=tuple(with_blocks(form, blocks) for form in port.forms),
    )
