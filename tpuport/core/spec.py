"""What a model port is made of: data and small pure functions, no devices.

A plugin hands over one :class:`ModelPort`. The session reads it; nothing here runs
anything. Importing this module, or building a port, imports neither torch nor jax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.core.request import Request
from tpuport.core.sharding import GATHERED, ShardRule
from tpuport.core.tensors import TensorSpec
from tpuport.core.work import Call as Call
from tpuport.core.work import StageContext, Tree, Work
from tpuport.errors import UnknownModelError, UsageError

if TYPE_CHECKING:
    from tpuport.core.attention import AttentionPolicy
    from tpuport.core.checkpoint import Checkpoint
    from tpuport.core.implementations import Implementation
    from tpuport.core.ops import OpOverride
    from tpuport.core.patching import Patch
    from tpuport.core.spatial import SpatialLayout
    from tpuport.core.splitting import ForwardSplit
    from tpuport.core.stacking import StackedBlocks
    from tpuport.core.transforms import WeightTransform
    from tpuport.core.vae_tiling import Footprint

BLOCKS = ("native", "upstream")
"""What ``--blocks`` takes; the first one is the default."""

TORCHAX = "torchax"
"""The implementation that every component has: upstream's own class, traced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeForm:
    """A component whose blocks are written for the chip, with upstream's weights.

    Attributes:
        patches: on upstream's modules, in force with ``--blocks native``, where they
            take the place of the port's patches on the same targets.
        transforms: of the weights that these want in another order.
        split: takes the place of ``Component.split``; ``None`` to keep it.
    """

    patches: tuple[Patch, ...]
    transforms: tuple[WeightTransform, ...] = ()
    split: ForwardSplit | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One folder of a checkpoint with weights.

    Attributes:
        name: the folder, as ``model_index.json`` names it.
        class_path: ``"package:Class"``, the upstream class.
        sharding: rules that match every stored weight exactly once.
        layouts: other tables of such rules by name, for ``--sharding NAME``; a
            component without the name keeps ``sharding``.
        stored_prefix: what stored names may have in front of the class's own, where
            files were saved by a version of upstream with one more module around it.
        ignored: regexes of stored names that upstream's loader passes over as well.
        single_device: run on the first device of the mesh instead of all of it.
        dtype: of its weights whatever the session's is; ``None`` for the session's.
        heads: the number of attention heads in a config, for mesh checks.
        split: where its forward can be cut for step caching; ``None`` if it cannot.
        stacked: dotted paths of its ``ModuleList`` s of identical blocks, which run
            under one scan on weights with a leading dim; sharding rules are written for
            the single blocks as ever. A ``StackedBlocks`` where not all are alike.
        native: the same computation written for the chip; ``None`` for upstream's own.
        transforms: of its weights as they are loaded; see :func:`with_blocks`.
        implementations: others than upstream's class, by name; see
            :mod:`tpuport.core.implementations`.
    """

    name: str
    class_path: str
    sharding: tuple[ShardRule, ...]
    layouts: Mapping[str, tuple[ShardRule, ...]] = field(default_factory=dict)
    stored_prefix: str = ""
    ignored: tuple[str, ...] = ()
    single_device: bool = False
    dtype: str | None = None
    heads: Callable[[Mapping[str, Any]], int] | None = None
    split: ForwardSplit | None = None
    stacked: tuple[str | StackedBlocks, ...] = ()
    native: NativeForm | None = None
    transforms: tuple[WeightTransform, ...] = ()
    implementations: Mapping[str, Implementation] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A pure function that a stage calls, compiled once per shape.

    Attributes:
        component: whose weights it takes.
        fn: ``fn(model, carry, constants, inputs) -> (carry, output)`` on JAX arrays;
            the model is a :class:`~tpuport.core.module.BoundModule`, or what the
            component's implementation binds.
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
        footprint: ``footprint(ctx, tiled, devices)`` estimates what each of the mesh's
            devices holds at the peak, in tiles or not; never much below what the
            compiler comes to. ``ctx`` has no inputs. With it, ``auto`` tiles where it
            must: see :mod:`tpuport.core.vae_tiling`.
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
    footprint: Callable[[StageContext, bool, Sequence[Any]], Footprint] | None = None

    def components_for(self, request: Request | None) -> tuple[str, ...]:
        """The components that a request needs; without a request, all of them."""
        if request is None or self.needs is None:
            return self.components
        return self.needs(request)


@dataclass(frozen=True, kw_only=True, slots=True)
class FrameRule:
    """Legal frame counts: ``step * n + 1``, up to ``limit``."""

    step: int
    limit: int | None = None

    def allows(self, frames: int) -> bool:
        """Whether ``frames`` is on the rule."""
        return (
            frames >= 1
            and (frames - 1) % self.step == 0
            and (self.limit is None or frames <= self.limit)
        )

    def nearest(self, frames: int) -> tuple[int, ...]:
        """The one or two legal counts closest to ``frames``, ascending."""
        below = max((frames - 1) // self.step, 0) * self.step + 1
        choices = [below, below + self.step]
        if self.limit is not None:
            top = (self.limit - 1) // self.step * self.step + 1
            choices = [min(c, top) for c in choices]
        return tuple(sorted(set(choices)))


@dataclass(frozen=True, kw_only=True, slots=True)
class SizeRule:
    """Legal heights and widths: multiples of ``multiple``, up to ``limit`` pixels."""

    multiple: int
    limit: int | None = None

    def allows(self, pixels: int) -> bool:
        """Whether one side is on the rule."""
        return (
            pixels >= self.multiple
            and pixels % self.multiple == 0
            and (self.limit is None or pixels <= self.limit)
        )

    def nearest(self, pixels: int) -> tuple[int, ...]:
        """The one or two legal sides closest to ``pixels``, ascending."""
        below = pixels // self.multiple * self.multiple
        choices = [max(below, self.multiple), below + self.multiple]
        if self.limit is not None:
            top = self.limit // self.multiple * self.multiple
            choices = [min(c, top) for c in choices]
        return tuple(sorted(set(choices)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A setting that only this model has, given as ``--option name=value``."""

    name: str
    help: str
    parse: Callable[[Any], Any]
    choices: tuple[Any, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One published checkpoint, as data.

    Attributes:
        name: what ``--variant`` takes.
        title: for people.
        repo_id: the hub id of the published weights; empty for the built-in demo.
        height, width, num_frames, fps: the default shape of a video.
        num_inference_steps, guidance_scale: defaults.
        dtype: of the published weights as run on a TPU.
        frames: the rule for frame counts.
        sizes: the rule for heights and widths.
        options: defaults of the model's own options.
        configs: the config of each component, for checks without weights.
        notes: caveats shown by ``tpuport models``.
        tasks: what it can do: ``"t2v"``, ``"i2v"`` (from an image), ``"v2v"`` (from a
            video).
        form: which of the model's forms it is a checkpoint of.
        resolutions: the size classes it knows, by name, as what ``bucket`` takes; the
            first one is the default.
        strength: default share of the steps that video to video runs.
    """

    name: str
    title: str
    repo_id: str
    height: int
    width: int
    num_frames: int
    fps: float
    num_inference_steps: int
    guidance_scale: float
    dtype: str
    frames: FrameRule
    sizes: SizeRule
    options: Mapping[str, Any] = field(default_factory=dict)
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    notes: str = ""
    tasks: tuple[str, ...] = ("t2v",)
    form: str = ""
    resolutions: Mapping[str, int] = field(default_factory=dict)
    strength: float = 0.8


def guided_by_scale(request: Request) -> bool:
    """Classifier-free guidance is on when its scale says so."""
    return request.guided


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPort:
    """Everything tpuport knows about a model.

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
        detect: the variant for a checkpoint that the user named no variant for.
        check: raises UsageError when a request does not fit the checkpoint.
        latent_shape: of the initial noise of one batch.
        make_demo: writes the demo checkpoint of the variant of that name into an empty
            folder.
        demo_version: part of the cache key of the demo checkpoints.
        guided: whether a request runs the negative prompts as well.
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
            upstream's class; see :func:`tpuport.core.implementations.with_chosen`.
    """

    name: str
    title: str
    pipelines: tuple[str, ...]
    components: Mapping[str, Component]
    stages: tuple[Stage, ...]
    variants: tuple[Variant, ...]
    patches: tuple[Patch, ...]
    overrides: tuple[OpOverride, ...]
    attention: AttentionPolicy
    options: tuple[Option, ...]
    detect: Callable[[Checkpoint], Variant]
    check: Callable[[Request, Variant, Checkpoint], None]
    latent_shape: Callable[[Request, Checkpoint], tuple[int, ...]]
    make_demo: Callable[[Path, str], None]
    demo_version: str
    guided: Callable[[Request], bool] = guided_by_scale
    bucket: Callable[[int, tuple[float, float]], tuple[int, int]] | None = None
    aspect: tuple[float, float] = (9, 16)
    check_variant: Callable[[Request, Variant], None] | None = None
    write_processors: Callable[[Path, Variant], None] | None = None
    form: str = ""
    forms: tuple[ModelPort, ...] = ()
    blocks: str = "upstream"
    chosen: Mapping[str, str] = field(default_factory=dict)

    @property
    def all_forms(self) -> tuple[ModelPort, ...]:
        """This form and the others."""
        return (self, *self.forms)

    @property
    def layouts(self) -> tuple[str, ...]:
        """The names of sharding layouts; the first is plain."""
        components = self.components.values()
        stacked = [GATHERED] if any(c.stacked for c in components) else []
        names = [n for c in components for n in c.layouts]
        return ("default", *stacked, *dict.fromkeys(names))

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

    def variant_names(self) -> Sequence[str]:
        """All variant names, in order."""
        return [v.name for v in self.variants]


def with_blocks(port: ModelPort, blocks: str) -> ModelPort:
    """The port with its native blocks in place, or as it is for ``"upstream"``.

    A form without native blocks stays as it is, and its ``blocks`` says so.

    Raises:
        UsageError: ``blocks`` is neither.
    """
    if blocks not in BLOCKS:
        raise UsageError(f"blocks {blocks!r}: choose from {', '.join(BLOCKS)}")
    if blocks == port.blocks:
        return port
    if port.blocks != "upstream":
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
