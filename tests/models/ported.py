"""Modules that are ported by a form of a plugin, and what became of their calls."""

from __future__ import annotations

import torch

from tpuport.core.seam.entry import Entry
from tpuport.core.seam.ported import seam_of
from tpuport.core.tracing.context import AttentionRecord
from tpuport.core.weights.sharding import ShardingPlan


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
