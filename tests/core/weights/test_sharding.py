"""Sharding rules: each weight matches exactly one, or the error names the thing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import pytest
from jax import ShapeDtypeStruct

from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.weights.sharding import (
    ShardingPlan,
    ShardRule,
    named_shardings,
    plan_sharding,
)
from tpuport.errors import ShardingError

MESH = {"dp": 2, "sp": 1, "tp": 4}

# A two-block model, [out, in] as in torch.
WEIGHTS = {
    f"blocks.{i}.{name}": ShapeDtypeStruct(shape, jnp.bfloat16)
    for i in range(2)
    for name, shape in {
        "up.weight": (16, 8),
        "up.bias": (16,),
        "down.weight": (8, 16),
        "norm.scale": (8,),
    }.items()
}

UP = ShardRule(pattern=r"blocks\.\d+\.up\.weight", spec=("tp", None))
UP_BIAS = ShardRule(pattern=r"blocks\.\d+\.up\.bias", spec=("tp",))
DOWN = ShardRule(pattern=r"blocks\.\d+\.down\.weight", spec=(None, "tp"))
NORM = ShardRule(pattern=r"blocks\.\d+\.norm\.scale", spec=())
RULES = (UP, UP_BIAS, DOWN, NORM)


def plan(
    rules: Sequence[ShardRule] = RULES,
    weights: Mapping[str, Any] = WEIGHTS,
    mesh: Mapping[str, int] = MESH,
) -> ShardingPlan:
    return plan_sharding(rules, weights, mesh, component="net")


def problems(
    rules: Sequence[ShardRule], weights: Mapping[str, Any] = WEIGHTS
) -> tuple[str, ...]:
    """What the error of a plan lists; empty for a plan without one."""
    try:
        plan(rules, weights)
    except ShardingError as error:
        return tuple(line[4:] for line in str(error).splitlines()[1:])
    return ()


def one(shape: tuple[int, ...], *spec: Any) -> tuple[str, ...]:
    """The problems of a single weight ``w`` under a single rule."""
    rules = (ShardRule(pattern="w", spec=spec),)
    return problems(rules, {"w": ShapeDtypeStruct(shape, jnp.float32)})


class TestRule:
    def test_a_pattern_that_is_no_regex_is_refused(self) -> None:
        with pytest.raises(ShardingError, match=r"rule 'a\(' is not a regex: missing"):
            ShardRule(pattern="a(", spec=())

    @pytest.mark.parametrize("spec", ["tp", ("tp", 1), ((),), ["tp"], (("tp", None),)])
    def test_a_spec_of_another_form_is_refused(self, spec: Any) -> None:
        with pytest.raises(ShardingError) as caught:
            ShardRule(pattern="a", spec=spec)
        assert str(caught.value) == (
            f"sharding rule 'a' has the spec {spec!r}; write one entry per dim, such "
            'as ("tp", None) or (("sp", "tp"), None), or () to replicate'
        )


class TestPlan:
    def test_every_weight_has_a_rule_and_rules_say_what_they_match(self) -> None:
        done = plan()
        assert dict(done.assignments) == {
            f"blocks.{i}.{name}": rule.spec
            for i in range(2)
            for name, rule in {
                "up.weight": UP,
                "up.bias": UP_BIAS,
                "down.weight": DOWN,
                "norm.scale": NORM,
            }.items()
        }
        assert [(u.pattern, u.spec, u.matches, u.bytes) for u in done.rules] == [
            (UP.pattern, ("tp", None), 2, 2 * 16 * 8 * 2),
            (UP_BIAS.pattern, ("tp",), 2, 2 * 16 * 2),
            (DOWN.pattern, (None, "tp"), 2, 2 * 8 * 16 * 2),
            (NORM.pattern, (), 2, 2 * 8 * 2),
        ]
        split, whole = 2 * (2 * 16 * 8 + 16) * 2, 2 * 8 * 2
        assert done.total_bytes == split + whole
        assert done.replicated_bytes == whole
        assert done.bytes_per_device == split // 4 + whole
        alone = plan(mesh={"dp": 1, "sp": 1, "tp": 1})
        assert alone.bytes_per_device == alone.replicated_bytes == done.total_bytes

    def test_a_pattern_must_match_the_whole_name(self) -> None:
        rules = (ShardRule(pattern=r"blocks\.\d+\.up", spec=()), *RULES[1:])
        with pytest.raises(ShardingError, match="has 1 problem:\n"):
            plan(RULES[1:])
        found = problems(rules)[0]
        assert found.endswith(": blocks.0.up.weight, blocks.1.up.weight")

    def test_an_empty_spec_replicates_any_rank(self) -> None:
        assert one(()) == one((3,)) == one((3, 5, 7)) == ()

    def test_a_dim_may_be_split_by_several_axes(self) -> None:
        mesh = {"dp": 1, "sp": 2, "tp": 4}
        rules = (ShardRule(pattern="w", spec=(("sp", "tp"), None)),)
        weights = {"w": ShapeDtypeStruct((16, 3), jnp.float32)}
        done = plan(rules, weights, mesh)
        assert done.bytes_per_device == 16 * 3 * 4 // 8

    def test_an_optional_rule_may_match_nothing(self) -> None:
        extra = ShardRule(pattern="learned", spec=(), optional=True)
        done = plan((*RULES, extra))
        assert done.rules[-1].matches == 0

    def test_weights_may_be_tensors_or_abstract_arrays(self) -> None:
        import ml_dtypes
        import numpy as np
        import torch

        weights = {
            "w.torch": torch.empty(4, 2, dtype=torch.bfloat16, device="meta"),
            "w.numpy": np.zeros((4, 2), ml_dtypes.bfloat16),
            "w.jax": ShapeDtypeStruct((4, 2), jnp.bfloat16),
        }
        done = plan((ShardRule(pattern=r"w\..*", spec=("tp", None)),), weights)
        assert done.total_bytes == 3 * 16


class TestProblems:
    def test_unmatched_weights_are_counted_and_the_first_named(self) -> None:
        assert problems(RULES[2:]) == (
            "no rule matches 4 weights of net (576 B): blocks.0.up.weight, "
            "blocks.0.up.bias, blocks.1.up.weight and 1 more",
        )

    def test_a_rule_that_matches_nothing(self) -> None:
        typo = ShardRule(pattern=r"block\.\d+\.up\.weight", spec=("tp", None))
        assert problems((*RULES, typo)) == (
            r"rule 'block\\.\\d+\\.up\\.weight' matches no weight of net; correct it, "
            "or set optional=True if only some configs have the weight",
        )

    def test_a_weight_that_two_rules_match(self) -> None:
        wide = ShardRule(pattern=r".*\.bias", spec=())
        assert problems((*RULES, wide)) == (
            r"rules 'blocks\\.\\d+\\.up\\.bias' and '.*\\.bias' match the same "
            "weight: blocks.0.up.bias, blocks.1.up.bias",
        )

    @pytest.mark.parametrize(
        ("shape", "spec", "told"),
        [
            (
                (8,),
                ("tp", None),
                "has a spec of rank 2, [tp, -], for a weight of rank 1, shape [8]: w",
            ),
            (
                (8, 8, 8),
                ("tp", None),
                "has a spec of rank 2, [tp, -], for a weight of rank 3, shape "
                "[8, 8, 8]: w",
            ),
            (
                (8, 30),
                (None, "tp"),
                "splits dim 1 of size 30 (shape [8, 30]) over mesh axis tp of size 4, "
                "which does not divide it: w",
            ),
            (
                (4,),
                (("dp", "tp"),),
                "splits dim 0 of size 4 (shape [4]) over mesh axis dp+tp of size 8, "
                "which does not divide it: w",
            ),
            ((8,), ("ep",), "names mesh axis 'ep', the mesh has dp, sp, tp"),
            (
                (16, 16),
                ("tp", "tp"),
                "uses mesh axis 'tp' 2 times in [tp, tp]; an axis can split one dim",
            ),
            (
                (16, 16),
                (("tp", "tp"), None),
                "uses mesh axis 'tp' 2 times in [tp+tp, -]; an axis can split one dim",
            ),
        ],
        ids=str,
    )
    def test_a_spec_that_does_not_fit(
        self, shape: tuple[int, ...], spec: Any, told: str
    ) -> None:
        assert one(shape, *spec) == (f"rule 'w' {told}",)

    def test_the_same_problem_of_many_weights_is_one_line(self) -> None:
        weights = {
            f"b.{i}": ShapeDtypeStruct((30 + i // 5, 1), jnp.float32) for i in range(6)
        }
        found = problems((ShardRule(pattern=r"b\..*", spec=("tp", None)),), weights)
        assert [text.split("divide it: ")[1] for text in found] == [
            "b.0, b.1, b.2 and 2 more",
            "b.5",
        ]

    def test_all_of_them_are_raised_at_once(self) -> None:
        rules = (
            UP,
            ShardRule(pattern=r"blocks\.0\..*bias", spec=("tp", None)),
            ShardRule(pattern=r"blocks\.\d\.down\.weight", spec=(None, "ep")),
            ShardRule(pattern="gone", spec=()),
        )
        with pytest.raises(ShardingError) as caught:
            plan(rules)
        lines = str(caught.value).splitlines()
        assert lines == [
            "sharding of net on mesh dp=2,sp=1,tp=4 has 4 problems:",
            r"  - rule 'blocks\\.\\d\\.down\\.weight' names mesh axis 'ep', "
            "the mesh has dp, sp, tp",
            r"  - rule 'blocks\\.0\\..*bias' has a spec of rank 2, [tp, -], "
            "for a weight of rank 1, shape [16]: blocks.0.up.bias",
            "  - no rule matches 3 weights of net (64 B): blocks.0.norm.scale, "
            "blocks.1.up.bias, blocks.1.norm.scale",
            "  - rule 'gone' matches no weight of net; correct it, or set "
            "optional=True if only some configs have the weight",
        ]


class TestReport:
    def test_as_dict_is_json_and_leaves_single_weights_out(self) -> None:
        done = plan()
        out = done.as_dict()
        assert json.loads(json.dumps(out)) == out
        assert out["mesh"] == MESH
        assert out["rules"][0] == {
            "pattern": UP.pattern,
            "spec": ["tp", None],
            "matches": 2,
            "bytes": 512,
        }
        assert "assignments" not in out

    def test_table(self) -> None:
        wide = ShardRule(pattern=DOWN.pattern, spec=(("dp", "tp"), None))
        spare = ShardRule(pattern="of another config", spec=(), optional=True)
        made = plan((UP, UP_BIAS, wide, NORM, spare))
        assert made.table() == [
            ("spec", "weights", "bytes", "pattern"),
            ("[tp, -]", "2", "512 B", r"blocks\.\d+\.up\.weight"),
            ("[tp]", "2", "64 B", r"blocks\.\d+\.up\.bias"),
            ("[dp+tp, -]", "2", "512 B", r"blocks\.\d+\.down\.weight"),
            ("replicated", "2", "32 B", r"blocks\.\d+\.norm\.scale"),
        ]
        assert made.remarks() == [
            "total 1.1 KiB, 240 B per device, of that 32 B replicated"
        ]


class TestNamedShardings:
    def test_arrays_are_placed_as_planned(self) -> None:
        import jax
        import numpy as np

        mesh = build_mesh(MeshSpec(dp=2, tp=4))
        shardings = named_shardings(plan(), mesh)
        assert list(shardings) == list(WEIGHTS)
        held = 0
        for name, sharding in shardings.items():
            array = jax.device_put(np.zeros(WEIGHTS[name].shape, np.float16), sharding)
            held += array.addressable_shards[0].data.nbytes
        assert held == plan().bytes_per_device
        down = shardings["blocks.0.down.weight"]
        assert down.shard_shape((8, 16)) == (8, 4)
        assert shardings["blocks.0.norm.scale"].is_fully_replicated

    def test_a_plan_for_another_mesh_is_not_placed(self) -> None:
        with pytest.raises(ShardingError) as caught:
            named_shardings(plan(), build_mesh(MeshSpec(tp=4)))
        assert str(caught.value) == (
            "sharding of net is planned for mesh dp=2,sp=1,tp=4, not for "
            "dp=1,sp=1,tp=4; plan it again"
        )
