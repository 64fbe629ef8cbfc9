"""What becomes of ``--attention``: its options, and a kernel that does not run."""

from __future__ import annotations

import torch

import tpuport
from tests.core.heard import Heard
from tests.pipelines.example import all_examples, made
from tpuport import targets
from tpuport.core.drive.rehearsal import rehearse
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.reports import Reporter
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.tracing.context import AttentionRecord


class Attends(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)


def records(attention: str) -> dict[str, list[AttentionRecord]]:
    """How attention runs in the components of a pipeline."""
    pipeline, call = made(all_examples()["CogVideoXPipeline"])
    placed = targets.place_for_port(MeshSpec())
    settings = RunSettings.read({"attention": attention})
    target = targets.general_target(placed, settings)
    found = rehearse(pipeline, target, {**call, "output_type": "latent"}, Reporter())
    return {one.name: list(one.attention) for one in found.programs if one.attention}


def test_options_are_for_what_denoises() -> None:
    near = records("blockwise:window=9,9;k_smooth=on")
    for record in near["transformer"]:
        assert record.implementation == "blockwise"
        assert (record.window, record.k_smooth) == ((9, 9), True)
    others = [
        one for name, some in near.items() if name != "transformer" for one in some
    ]
    assert others
    for record in others:
        assert (record.implementation, record.window) == ("blockwise", None)


def test_what_became_of_a_choice_that_does_not_run_is_told_once() -> None:
    heard = Heard()
    choice = "auto:block_kv_compute=128"
    module = tpuport.port(Attends(), attention=choice, reporter=heard)
    for length in (1024, 1152):
        module(torch.ones(1, 1, length, 16))
    (line,) = heard.about("without")
    assert line == "Attends: attention: blockwise runs, without block_kv_compute=128"


def test_a_module_by_itself_has_the_options() -> None:
    x = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    whole, near = (
        tpuport.port(Attends(), attention=text)(x)
        for text in ("blockwise", "blockwise:window=2,2")
    )
    assert float((whole - near).abs().max()) > 0.01
