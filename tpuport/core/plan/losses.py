"""Where a plan loses time, the most first, each with a remedy and an example."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tpuport.core.cost.program_time import ATTENTION, OTHER, Row
from tpuport.core.plan.measure import Measured
from tpuport.core.plan.plan import DENOISE, Plan, StagePlan
from tpuport.core.reports import bytes_text, plural
from tpuport.core.weights.sharding import ShardingPlan

#: The attention that is a kernel.
_KERNEL = "splash"
_TURNS = ("copy", "transpose")
#: Of a step; what loses less is left out.
_LEAST = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Something that a TPU does not like.

    Attributes:
        seconds: of a step, at most.
        what: in words.
        remedy: what to do.
        example: a file that does so.
    """

    seconds: float
    what: str
    remedy: str
    example: str


def losses(plan: Plan) -> list[Loss]:
    """What a plan's steps lose, ordered by seconds; at least a thousandth of a step."""
    stage = plan.stage(DENOISE)
    if stage is None:
        return []
    found = [*_host(plan), *(one for p in stage.programs for one in _of(p, stage))]
    called = {program.component for program in stage.programs}
    for sharding in plan.sharding_plans:
        if sharding.component.partition(".")[0] in called:
            found += _unsplit(sharding, plan)
    least = _LEAST * (plan.seconds_per_step or 0)
    kept = [one for one in found if one.seconds >= least]
    return sorted(kept, key=lambda one: -one.seconds)


def _of(program: Measured, stage: StagePlan) -> Iterator[Loss]:
    if program.account is None:
        return
    times, rows = program.calls / stage.calls, program.account.rows
    name = program.program

    def seconds(chosen: list[Row]) -> float:
        return times * math.fsum(row.seconds for row in chosen)

    slow = [one for one in program.attention if one["implementation"] != _KERNEL]
    if slow:
        by_xla = [
            r for r in rows if r.category == ATTENTION and r.opcode != "custom-call"
        ]
        worst = max(slow, key=lambda one: one["query"][2] * one["key"][2])
        size = f"{worst['query'][2]} x {worst['key'][2]}"
        yield Loss(
            seconds=seconds(by_xla),
            what=f"{name}: {plural(len(slow), 'attention call')} without the kernel, "
            f"of {size} arrays: {worst['reason']}",
            remedy="leave tokens out by a number of keys, not by a mask, or attend in "
            "another shape",
            example="tpuport/patches/valid_tokens.py",
        )
    turned = [row for row in rows if _turns(row)]
    if turned:
        most = max(turned, key=lambda row: row.seconds)
        where = "/".join(most.source.split("/")[-3:]) or most.name
        yield Loss(
            seconds=seconds(turned),
            what=f"{name}: {plural(len(turned), 'array')} turned around or copied, "
            f"most of it at {where}",
            remedy="a native block that keeps tokens in the order of the kernels",
            example="tpuport/core/layers/joint_sequence.py",
        )
    for use in program.account.collectives():
        if use.exposed_seconds:
            yield Loss(
                seconds=times * use.exposed_seconds,
                what=f"{name}: {use.count} {use.kind} over {use.axis or 'all devices'},"
                f" {bytes_text(use.bytes)} a call, waited for",
                remedy="compare meshes with `tpuport plan --mesh auto`, or keep arrays "
                "split in a native block",
                example="tpuport/core/layers/exchanged_attention.py",
            )


def _turns(row: Row) -> bool:
    if row.category != OTHER or not row.seconds:
        return False
    fused = row.opcode == "fusion" and any(word in row.name for word in _TURNS)
    return row.opcode in _TURNS or fused


def _unsplit(sharding: ShardingPlan, plan: Plan) -> Iterator[Loss]:
    """Weights that every device reads whole."""
    whole, devices = sharding.replicated_bytes, plan.mesh.size
    if not whole or devices == 1 or sharding.held:
        return
    # A layout that splits nothing here waits for a mesh.
    laid_out = any(use.matches and use.spec for use in sharding.rules)
    mesh = "a mesh with tp, which the layout is for: `tpuport plan --mesh auto`"
    yield Loss(
        seconds=whole * (1 - 1 / devices) / plan.chip.hbm_bandwidth,
        what=f"{sharding.component}: {bytes_text(whole)} of weights are whole on every "
        "device",
        remedy=mesh
        if laid_out and plan.mesh.tp == 1
        else "a layout in the plugin, and a mesh with tp",
        example="docs/example/toy_plugin.py",
    )


def _host(plan: Plan) -> Iterator[Loss]:
    if plan.host_seconds is not None:
        yield Loss(
            seconds=plan.host_seconds,
            what="the host between programs, on this machine",
            remedy="keep answers on the devices: read no number in a step",
            example="tpuport/core/seam/device_tensors.py",
        )
