"""Modules that are ported by a form of a plugin, and what became of their calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.seam.entry import Entry
from tpuport.core.seam.ported import port_module, seam_of
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.tracing.context import AttentionRecord
from tpuport.core.weights.sharding import DEFAULT_LAYOUT, ShardingPlan
from tpuport.targets import general_target, place_for_port


def ported_by(form: ModelPort, name: str, module: Any, mesh: Any = None) -> Any:
    """The module as the component ``name`` of a form, which may be a changed one."""
    placed = place_for_port(None if mesh is None else MeshSpec.parse(mesh))
    general = general_target(placed, RunSettings())
    names = {type(module).__name__: name}
    return port_module(module, general.claimed(form, names, DEFAULT_LAYOUT))


def unstacked(form: ModelPort, name: str) -> ModelPort:
    """The form without scans over the blocks of a component."""
    one_by_one = replace(form.components[name], stacked=())
    return replace(form, components={**form.components, name: one_by_one})


def entry_of(ported: torch.nn.Module) -> Entry:
    """What answers the module's own calls; there is one after the first call."""
    return seam_of(ported).entries[type(ported).__name__]


def plan_of(ported: torch.nn.Module) -> ShardingPlan:
    """Where the module's weights went."""
    plan = entry_of(ported).plan
    assert plan is not None
    return plan


def records_of(ported: torch.nn.Module) -> list[AttentionRecord]:
    """The calls of attention in the program of the module's last new shapes."""
    return list(entry_of(ported).programs[-1].attention)
