"""What programs are made for, and what a plugin knows of their modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import torch
from jax.sharding import NamedSharding, PartitionSpec

from tpuport.core.enums import Blocks
from tpuport.core.layers.attention_lengths import LENGTH_ATTENTION
from tpuport.core.layers.exchanged_attention import EXCHANGED_ATTENTION
from tpuport.core.layers.model_runtime import EVERYWHERE, model_runtime
from tpuport.core.programs.executable_files import Entry
from tpuport.core.programs.jax_cache import persistent_cache
from tpuport.core.programs.module_programs import ModulePrograms, lowered, module_key
from tpuport.core.spec.component import Component
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.tracing.context import AttentionPolicy
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.core.tracing.patching import Patch
from tpuport.core.tracing.runtime import Runtime
from tpuport.core.weights.sharding import ShardingPlan
from tpuport.kernels.attention.choice import AttentionChoice


@dataclass(frozen=True, kw_only=True, eq=False)
class Claim:
    """What a plugin knows of a component.

    Attributes:
        port: the form of the model, with its blocks in place.
        component: the name of the component there.
        layout: of the sharding rules.
    """

    port: ModelPort
    component: str
    layout: str

    def plan(self, stored: Mapping[str, Any], mesh: Mapping[str, int]) -> ShardingPlan:
        """Where the weights go.

        Raises:
            ShardingError: the weights are not those that the rules are for.
        """
        return self.port.sharding_plan(self.component, self.layout, stored, mesh)

    @property
    def about(self) -> Component:
        """The component as the plugin declares it."""
        return self.port.components[self.component]


@dataclass(frozen=True, kw_only=True, eq=False)
class Target:
    """What programs are made for.

    Attributes:
        mesh: the devices.
        patches: on upstream code, applied while tracing.
        overrides: of torch operators.
        attention: how attention is split over the mesh.
        implementation: of attention.
        everywhere: the op overrides of attention.
        claims: what a plugin knows of components, by name.
        general: for a component that is not as the plugin knows it.
        cache: a folder where jax keeps compiled programs; ``None`` keeps none.
        built: executables that are used in place of compiling.
    """

    mesh: jax.sharding.Mesh
    patches: tuple[Patch, ...] = ()
    overrides: tuple[OpOverride, ...] = ()
    everywhere: tuple[OpOverride, ...] = (EXCHANGED_ATTENTION, LENGTH_ATTENTION)
    claims: Mapping[str, Claim] = field(default_factory=dict)
    general: Target | None = None
    cache: Path | None = None
    built: ModulePrograms | None = None
    attention: AttentionPolicy = AttentionPolicy()
    implementation: AttentionChoice = AttentionChoice()

    @functools.cached_property
    def replicated(self) -> NamedSharding:
        """The whole array on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    @property
    def blocks(self) -> Blocks:
        """The blocks in place."""
        forms = [claim.port for claim in self.claims.values()]
        return forms[0].blocks if forms else Blocks.UPSTREAM

    def runtime(self, *, exact: bool) -> Runtime:
        """A tracing environment; ``exact`` asks for float32 products in full."""
        return model_runtime(
            mesh=self.mesh,
            platform=str(self.mesh.devices.flat[0].platform),
            patches=self.patches,
            overrides=self.overrides,
            everywhere=self.everywhere,
            attention=self.attention,
            attention_implementation=self.implementation,
            matmul_precision="highest" if exact else None,
        )

    def compiled(
        self,
        traced: jax.stages.Traced,
        name: str,
        module: torch.nn.Module | None,
        weights: Mapping[str, Any],
        stages: Sequence[str],
    ) -> tuple[Callable[..., Any], Entry | None]:
        """What runs a program, and the executable if it was built before.

        Args:
            name, module, weights, stages: of its key; see :func:`module_key`.
        """
        with persistent_cache(self.cache):
            if self.built is None:
                return traced.lower().compile(), None
            text = lowered(traced)
            key = module_key(name, module, self.mesh, weights, text, stages)
            return self.built.ready(key, text, self.mesh)

    def claimed(self, form: ModelPort, names: Mapping[str, str], layout: str) -> Target:
        """This general target with what a plugin knows.

        Args:
            form: of the plugin, with its blocks in place.
            names: of modules at the seam -> the component that each is.
            layout: of the sharding rules.

        Raises:
            UsageError: the model has no such layout.
        """
        for component in names.values():
            form.rules(component, layout)
        return replace(
            self,
            patches=tuple(form.patches),
            overrides=tuple(form.overrides),
            attention=form.attention,
            everywhere=EVERYWHERE,
            claims={
                name: Claim(port=form, component=component, layout=layout)
                for name, component in names.items()
            },
            general=self,
        )
