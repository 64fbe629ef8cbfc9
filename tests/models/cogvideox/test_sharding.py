"""The sharding rules on the full-size configs, without weights."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest

from tpuport.core.tracing.ported_module import WeightNames
from tpuport.core.weights.sharding import ShardingPlan, WeightInfo, plan_sharding
from tpuport.core.weights.skeleton import build_skeleton
from tpuport.errors import ShardingError
from tpuport.models.cogvideox.config import VARIANTS
from tpuport.models.cogvideox.plugin import PORT

PUBLISHED = [v for v in VARIANTS if v.repo_id]


@cache
def weights(variant: str, component: str) -> dict[str, WeightInfo]:
    config = PORT.variant(variant).configs[component]
    module = build_skeleton(PORT.components[component], config)
    tensors = dict(module.state_dict(keep_vars=True))
    return {
        name: WeightInfo(tuple(tensors[name].shape), 2)
        for name in WeightNames.of(module).stored
    }


def plan(variant: str, component: str, tp: int, dp: int = 1) -> ShardingPlan:
    return plan_sharding(
        PORT.components[component].sharding,
        weights(variant, component),
        {"dp": dp, "sp": 1, "tp": tp},
        component=component,
    )


@pytest.mark.parametrize("component", ["text_encoder", "transformer", "vae"])
@pytest.mark.parametrize("variant", [v.name for v in PUBLISHED])
def test_every_weight_matches_exactly_one_rule_and_divides(
    variant: str, component: str
) -> None:
    # 30 heads of 2b divide by 2 but not by 4.
    degrees = (1, 2) if variant == "2b" else (1, 2, 4, 8)
    for tp in degrees:
        found = plan(variant, component, tp)
        assert set(found.assignments) == set(weights(variant, component))


@pytest.mark.parametrize(
    ("variant", "billions"),
    [
        ("2b", 1.69),
        ("5b", 5.57),
        # 17,776 learned positions of 3,072 features.
        ("5b-i2v", 5.57 + 0.05),
        ("1.5-5b", 5.57),
        ("1.5-5b-i2v", 5.57),
    ],
)
def test_the_full_size_configs_have_the_published_sizes(
    variant: str, billions: float
) -> None:
    total = plan(variant, "transformer", 1).total_bytes / 2 / 1e9
    assert total == pytest.approx(billions, abs=0.01)
    text = plan(variant, "text_encoder", 1).total_bytes / 2 / 1e9
    assert text == pytest.approx(4.76, abs=0.01)


def test_the_large_layers_are_split() -> None:
    found = plan("1.5-5b", "transformer", 8)
    # The hand-written tables left 2.4 of 5.57 billion parameters whole.
    assert found.replicated_bytes < 0.01 * found.total_bytes
    split = {n for n, spec in found.assignments.items() if any(spec)}
    for pattern in (
        r"transformer_blocks\.0\.ff\.net\.0\.proj\.weight",
        r"transformer_blocks\.0\.ff\.net\.0\.proj\.bias",
        r"transformer_blocks\.41\.ff\.net\.2\.weight",
        r"transformer_blocks\.7\.norm1\.linear\.weight",
        r"transformer_blocks\.7\.norm2\.linear\.bias",
        r"transformer_blocks\.3\.attn1\.to_q\.bias",
        r"norm_out\.linear\.weight",
    ):
        assert any(re.fullmatch(pattern, name) for name in split), pattern


def test_the_weights_of_image_to_video_are_placed() -> None:
    extra = set(weights("5b-i2v", "transformer")) - set(weights("5b", "transformer"))
    assert extra == {"patch_embed.pos_embedding"}
    assert weights("5b-i2v", "transformer")[extra.pop()].shape == (1, 17776, 3072)
    found = plan("1.5-5b-i2v", "transformer", 8)
    assert found.assignments["ofs_embedding.linear_1.weight"] == ()
    assert found.replicated_bytes < 0.01 * found.total_bytes


def test_column_and_row_parallel_are_the_right_way_round() -> None:
    found = plan("5b", "transformer", 4).assignments
    block = "transformer_blocks.0."
    # torch stores [out, in].
    assert found[block + "attn1.to_q.weight"] == ("tp", None)
    assert found[block + "ff.net.0.proj.weight"] == ("tp", None)
    assert found[block + "attn1.to_out.0.weight"] == (None, "tp")
    assert found[block + "ff.net.2.weight"] == (None, "tp")
    assert found[block + "attn1.to_out.0.bias"] == ()


def test_heads_that_do_not_divide_are_named() -> None:
    with pytest.raises(ShardingError, match=r"not divisible|does not divide"):
        plan("2b", "transformer", 7)


def test_a_new_weight_upstream_would_be_noticed() -> None:
    extra: dict[str, Any] = {
        **weights("5b", "transformer"),
        "transformer_blocks.0.attn1.to_gate.weight": WeightInfo((3072, 3072), 2),
    }
    with pytest.raises(ShardingError, match=r"attn1\.to_gate\.weight"):
        plan_sharding(
            PORT.components["transformer"].sharding,
            extra,
            {"dp": 1, "sp": 1, "tp": 1},
            component="transformer",
        )
