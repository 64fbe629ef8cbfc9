"""What a plan loses is told by seconds, the most first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from tpuport.core.cost.network import Collective
from tpuport.core.cost.program_time import Account, Row
from tpuport.core.mesh.chips import chip
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.plan.losses import losses
from tpuport.core.plan.measure import Measured, Memory
from tpuport.core.plan.plan import Plan, StagePlan
from tpuport.core.spec.model_plugin import Layout, Module

V6E = chip("v6e")


def row(category: str, opcode: str, seconds: float, **more: Any) -> Row:
    name = more.pop("name", opcode)
    return Row(
        name=name,
        opcode=opcode,
        source=f"jit(transformer)/blocks/{name}",
        category=category,
        times=1,
        seconds=seconds,
        **more,
    )


def plan_of(rows: list[Row], attention: list[dict[str, Any]], **more: Any) -> Plan:
    program = Measured(
        stage="denoise",
        program="transformer",
        component="transformer",
        calls=4,
        memory=Memory(weights=0, inputs=0, temporaries=0, code=0, resident=0, total=0),
        limit=1,
        lower_seconds=0,
        compile_seconds=0,
        account=Account(seconds=1.0, rows=rows),
        flops=0,
        devices=8,
        attention=attention,
    )
    stage = StagePlan(name="denoise", programs=(program,), chip=V6E, steps=2)
    return Plan(
        model="LTXPipeline",
        weights="",
        topology="v6e-8",
        chip=V6E,
        mesh=MeshSpec(dp=1, sp=8, tp=1),
        settings={},
        dtype="bfloat16",
        attention="auto",
        sharding="default",
        blocks="upstream",
        stages=(stage,),
        host_seconds=0.05,
        **more,
    )


def test_losses_are_ordered_and_have_remedies_in_files_that_exist() -> None:
    moved = Collective(kind="all-to-all", axis="sp", bytes=8, seconds=0.1, loads=())
    little = replace(moved, kind="all-reduce", seconds=1e-5)
    rows = [
        row("attention", "fusion", 0.2),
        row("attention", "custom-call", 0.9),
        row("other", "fusion", 0.3, name="copy_fusion.1"),
        row("other", "fusion", 0.9, name="add_fusion"),
        row("collective", "all-reduce", 1e-5, collective=little),
        row("collective", "all-to-all", 0.01, collective=moved),
    ]
    slow = {
        "query": (1, 4, 4096, 64),
        "key": (1, 4, 512, 64),
        "implementation": "reference",
        "reason": "a mask",
    }
    fast = {**slow, "implementation": "splash"}
    found = losses(plan_of(rows, [slow, fast]))
    assert [round(one.seconds, 3) for one in found] == [0.6, 0.4, 0.05, 0.02]
    turned, attended, host, waited = found
    assert "1 array turned around" in turned.what
    assert "blocks/copy_fusion.1" in turned.what
    assert "1 attention call without the kernel, of 4096 x 512" in attended.what
    assert "the host" in host.what
    assert "all-to-all over sp" in waited.what
    from pathlib import Path

    root = Path(__file__).parents[3]
    assert all((root / one.example).is_file() for one in found)
    assert losses(plan_of([], [fast]))[0].what == host.what


@pytest.mark.parametrize(
    ("layout", "told"),
    [
        ({}, "a layout in the plugin, and a mesh with tp"),
        ({r"to_q\.weight": ("tp", None)}, "a mesh with tp, which the layout is for"),
    ],
)
def test_whole_weights_ask_for_what_is_not_there(layout: Layout, told: str) -> None:
    weights = {"to_q.weight": jax.ShapeDtypeStruct((1 << 17, 1 << 17), np.int8)}
    axes = {"dp": 1, "sp": 8, "tp": 1}
    sharding = Module(layout=layout).plan("transformer", "default", weights, axes)
    plan = plan_of([], [], sharding_plans=(sharding,))
    whole = next(one for one in losses(plan) if "of weights are whole" in one.what)
    assert whole.remedy.startswith(told)
