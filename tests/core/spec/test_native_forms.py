"""Native blocks of a plugin: what is put in place, and that the result is upstream's.

The toy's native form has its queries' elements in another order within each head, by a
weight transform, and its keys by a patch: half of the form gives another result.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.core.heard import Heard
from tests.tolerances import TOLERANCES
from tpuport.core.enums import Blocks
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.reports import Reporter
from tpuport.core.seam.ported import port_module, seam_of
from tpuport.core.spec.model_plugin import ModelPlugin, Module
from tpuport.core.spec.run_settings import RunSettings
from tpuport.plugin import NativeForm, Patch, WeightTransform
from tpuport.targets import general_target, place_for_port

HEADS, HEAD_DIM = 4, 2


class Attends(torch.nn.Module):
    """Queries of an input on keys that are another."""

    config: ClassVar[dict[str, Any]] = {"heads": HEADS}

    def __init__(self) -> None:
        super().__init__()
        self.to_q = torch.nn.Linear(HEADS * HEAD_DIM, HEADS * HEAD_DIM)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, k = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (self.to_q(x), y))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k)
        return out.transpose(1, 2).flatten(2)


def flipped(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """The rows of each head from last to first."""
    return tensor.unflatten(0, (-1, HEAD_DIM)).flip(1).flatten(0, 1)


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The toy's, on queries whose elements are flipped."""

    def native(self: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        q, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2) for z in (self.to_q(x), y))
        k = torch.stack(v.unbind(-1)[::-1], -1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        return out.transpose(1, 2).flatten(2)

    return native


PATCH = Patch(
    name="toy-native-forward",
    target=f"{__name__}:Attends.forward",
    replacement=forward,
    wraps=True,
    reason="keys in the order of the queries",
    upstream="",
)
OTHER = replace(PATCH, name="other", target="textwrap:dedent")
TRANSFORM = WeightTransform(
    pattern=r"to_q\.(weight|bias)", apply=flipped, reason="elements in another order"
)
FORM = NativeForm(patches=(PATCH,), transforms=(TRANSFORM,))
LAYOUT = {r"to_q\.weight": ("tp", None), r"to_q\.bias": ("tp",)}


def plugin(form: NativeForm | None = FORM, **more: Any) -> ModelPlugin:
    modules = {"Attends": Module(layout=LAYOUT, native=form), **more.pop("modules", {})}
    return ModelPlugin("toy", claims="diffusers:LTXPipeline", modules=modules, **more)


# --- what is put in place


def test_native_patches_come_on_top_of_what_always_holds() -> None:
    model = plugin(patches=(OTHER,))
    assert model.patches_with(Blocks.UPSTREAM) == (OTHER,)
    assert model.patches_with(Blocks.NATIVE) == (OTHER, PATCH)
    # A native patch takes the place of one on its target.
    before = replace(PATCH, name="before")
    model = plugin(patches=(before, OTHER))
    assert model.patches_with(Blocks.NATIVE) == (OTHER, PATCH)
    # One that two modules share is in force once.
    shared = plugin(modules={"vae": Module(native=FORM)})
    assert shared.patches_with(Blocks.NATIVE) == (PATCH,)
    # Of two on one target neither gives way: they cannot be applied, and are named.
    second = NativeForm(patches=(replace(PATCH, name="second"),))
    both = plugin(modules={"vae": Module(native=second)}).patches_with(Blocks.NATIVE)
    assert [patch.name for patch in both] == [PATCH.name, "second"]


# --- a module with them


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, 2, 6, 8, generator=torch.Generator().manual_seed(1))
    return x, y


def run(
    model: ModelPlugin, blocks: str = "native", mesh: str = "1,1,1", **how: Any
) -> tuple[float, Any]:
    """How far the ported toy is from upstream's, and what answers its calls."""
    torch.manual_seed(0)
    module = Attends().eval()
    placed = place_for_port(MeshSpec.parse(mesh))
    target = general_target(placed, RunSettings()).of_plugin(
        model, Blocks(blocks), "default"
    )
    with torch.no_grad():
        ported = port_module(module, target, how.get("reporter", Reporter()))
        difference = float((ported(*inputs()) - module(*inputs())).abs().max())
    return difference, seam_of(ported).entries["Attends"]


@pytest.mark.parametrize("mesh", ["1,1,1", "dp=2,tp=4"])
@pytest.mark.parametrize("blocks", ["native", "upstream"])
def test_both_kinds_of_blocks_give_upstreams_result(mesh: str, blocks: str) -> None:
    difference, entry = run(plugin(), blocks, mesh)
    assert difference <= TOLERANCES["component float32"]
    applied = {one.name for one in entry.patches if one.state == "applied"}
    assert (PATCH.name in applied) == (blocks == "native")
    # What was asked for is what is on the devices: the transform moved the rows.
    weight = entry.module.to_q.weight.detach()
    wanted = flipped(weight, {}) if blocks == "native" else weight
    np.testing.assert_array_equal(entry._weights["to_q.weight"], wanted)


@pytest.mark.parametrize("left_out", ["patches", "transforms"])
def test_half_of_a_native_form_gives_another_result(left_out: str) -> None:
    """So the comparison above would see it."""
    difference, _ = run(plugin(replace(FORM, **{left_out: ()})))
    assert difference > 100 * TOLERANCES["component float32"]


def test_a_config_that_the_form_does_not_know_runs_as_upstreams() -> None:
    heard = Heard()
    other = replace(FORM, fits=lambda config: config["heads"] == HEADS + 1)
    difference, entry = run(plugin(other), reporter=heard)
    assert difference <= TOLERANCES["component float32"]
    assert PATCH.name not in {one.name for one in entry.patches}
    (line,) = heard.about("than the plugin of toy knows")
    assert "settings in its config" in line
