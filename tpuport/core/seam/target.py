"""What programs are made for, and what a plugin knows of their modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core.enums import Blocks, WeightsOn, denoises
from tpuport.core.files.stores import AnyPath
from tpuport.core.programs.built_folder import BuiltFolder
from tpuport.core.spec.model_plugin import ModelPlugin
from tpuport.core.tracing.forward_split import ForwardSplit
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.core.tracing.patching import Patch
from tpuport.core.tracing.runtime import Runtime
from tpuport.core.weights.sharding import ShardingPlan
from tpuport.core.weights.transforms import WeightTransform
from tpuport.kernels.attention.choice import AttentionChoice


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """What a plugin knows of a component.

    Attributes:
        plugin: its name.
        plan: ``plan(weights, mesh)``: where the weights go. Raises ShardingError for
            weights that the plugin does not know.
        transforms: of the weights.
        fits: whether its config is one that the native blocks know.
        whole: native blocks are in place, which take the place of the whole forward.
        space: ``Module.split``; it holds for the parts that upstream calls, too.
        split: where its forward splits; ``None`` for what is found.
    """

    plugin: str
    plan: Callable[[Mapping[str, Any], Mapping[str, int]], ShardingPlan]
    transforms: tuple[WeightTransform, ...] = ()
    fits: Callable[[Mapping[str, Any]], bool] = lambda config: True
    whole: bool = False
    space: bool = False
    split: ForwardSplit | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """What programs are made for.

    Attributes:
        mesh: the devices.
        patches: on upstream code, applied while tracing.
        overrides: of torch operators.
        implementation: of attention.
        alone: for one module, whose attention has all options that were asked for; of a
            pipeline the options are for what denoises.
        claims: what a plugin knows of components, by name.
        blocks: those in place.
        general: for a component that is not as the plugin knows it.
        cache: a folder, here or in a store, for compiled programs; ``None`` keeps none.
        built: executables that are used in place of compiling.
        in_parts: weights of stacked blocks are held in parts though they fit.
        weights_on: where the weights of stacked blocks wait.
        streamed: components whose programs were refused for their size, so that
            ``auto`` is the host for them.
    """

    mesh: jax.sharding.Mesh
    patches: tuple[Patch, ...] = ()
    overrides: tuple[OpOverride, ...] = ()
    claims: Mapping[str, Claim] = field(default_factory=dict)
    general: Target | None = None
    cache: AnyPath | None = None
    built: BuiltFolder | None = None
    blocks: Blocks = Blocks.UPSTREAM
    implementation: AttentionChoice = AttentionChoice()
    alone: bool = False
    in_parts: bool = False
    weights_on: WeightsOn = WeightsOn.AUTO
    streamed: frozenset[str] = frozenset()

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The whole array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def streaming(self, components: frozenset[str]) -> Target:
        """This target with the weights of some components on the host."""
        if not components:
            return self
        general = self.general and self.general.streaming(components)
        return replace(self, streamed=components, general=general)

    def with_executables(self, built: BuiltFolder | None) -> Target:
        """This target with executables; what streams in them streams."""
        if built is None:
            return self
        return replace(self.streaming(built.streamed), built=built)

    def splits_space(self, name: str) -> bool:
        """Whether programs of a module, or of a part, are split in space.

        On one CPU device there is nothing to split; on one TPU kernels are in place.
        """
        claim = self.claims.get(name.partition(".")[0])
        alone = self.mesh.size == 1 and self.mesh.devices.flat[0].platform != "tpu"
        return claim is not None and claim.space and not alone

    def runtime(self, name: str, *, exact: bool) -> Runtime:
        """The tracing environment of a module.

        Args:
            name: of the module, or of a part.
            exact: float32 products in full.
        """
        choice = self.implementation
        return Runtime(
            mesh=self.mesh,
            platform=str(self.mesh.devices.flat[0].platform),
            patches=self.patches,
            overrides=self.overrides,
            attention_implementation=(
                choice if self.alone or denoises(name) else choice.plain
            ),
            matmul_precision="highest" if exact else None,
        )

    def of_plugin(
        self,
        plugin: ModelPlugin,
        blocks: Blocks,
        layout: str,
        chosen: Mapping[str, str] = MappingProxyType({}),
    ) -> Target:
        """This general target with what a plugin knows.

        Args:
            blocks: ``NATIVE`` puts the native blocks in place that the plugin has.
            layout: of the sharding rules.
            chosen: module -> name of a form of it.

        Raises:
            UsageError: the plugin has no such layout, or a module no such form.
            PluginError: what the plugin names cannot be imported.
        """
        plugin.check_layout(layout)
        plugin.check_forms(chosen)
        forms = plugin.forms_with(blocks, chosen)
        native = blocks == Blocks.NATIVE
        native = native and any(m.native for m in plugin.modules.values())
        claims = {}
        for name, module in plugin.modules.items():
            form = forms.get(name)
            claims[name] = Claim(
                plugin=plugin.name,
                plan=functools.partial(plugin.plan, name, layout),
                transforms=form.transforms if form else (),
                fits=form.fits if form else (lambda config: True),
                whole=form is not None and form is module.native,
                space=module.split == "space",
                split=form.split if form else None,
            )
        patches = plugin.patches_with(blocks, chosen)
        return replace(
            self,
            # A plugin's own may be listed with the standard ones.
            patches=tuple(dict.fromkeys((*self.patches, *patches))),
            overrides=(*self.overrides, *plugin.overrides),
            claims=claims,
            blocks=Blocks.NATIVE if native else Blocks.UPSTREAM,
            general=self,
        )
