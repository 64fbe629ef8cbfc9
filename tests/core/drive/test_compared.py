"""Where a port parts from upstream's code is found, down to the smallest module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import torch

from tests.pipelines.example import all_examples, made
from tests.tolerances import TOLERANCES
from tpuport import targets
from tpuport.core.drive.changes_run import counting
from tpuport.core.drive.compared import Pair
from tpuport.core.drive.rounding import MOST
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.reports import Reporter
from tpuport.core.seam.target import Target
from tpuport.core.seam.values import copied
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.tracing.op_overrides import OpOverride
from tpuport.patches.diffusers import diffusers_patch

NORM = "models.normalization:RMSNorm.forward"


@pytest.fixture(scope="module")
def pair() -> Pair:
    one = all_examples()["LTXPipeline"]
    ours, call = made(one)

    def arguments() -> dict[str, Any]:
        generator = torch.Generator("cpu").manual_seed(0)
        return {**call, "generator": generator, "output_type": "np"}

    return Pair(ours=ours, theirs=made(one)[0], arguments=arguments)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[np.ndarray]:
    return pair.expected()


def target_with(replacement: Callable[..., Any] | None) -> Target:
    placed = targets.place_for_port(MeshSpec())
    found = targets.claimed_target("LTXPipeline", placed, RunSettings(), Reporter())
    if replacement is None:
        return found
    patch = diffusers_patch("norm", NORM, replacement, "a test", wraps=True)
    return replace(found, patches=(*found.patches, patch))


def test_every_call_of_an_exact_port_is_as_upstreams(
    pair: Pair, expected: list[np.ndarray]
) -> None:
    """Over 10 s: a pipeline's programs are compiled."""
    target, ran = counting(target_with(None))
    found = pair.compare(target, expected)
    assert found.equal
    counts = {name: count for name, (count, _) in found.calls.items()}
    assert counts == {"text_encoder": 2, "transformer": 2, "vae.decode": 1}
    assert {"linear", "convolution"} <= {name for name in ran if ran[name]}
    assert TOLERANCES["video float32"] >= MOST


def test_the_first_call_that_differs_and_its_smallest_part_are_named(
    pair: Pair, expected: list[np.ndarray]
) -> None:
    """Over 10 s: as above, and parts of the transformer one by one."""
    target = target_with(lambda upstream: lambda self, x: upstream(self, x) * 1.01)
    found = pair.compare(target, expected, calls=False)
    assert not found.equal
    assert found.first == "transformer"
    assert found.part == "transformer.transformer_blocks.0.norm1 (RMSNorm)"
    assert found.op == "mul, which only the port runs"
    assert found.calls["text_encoder"][1] < MOST < found.calls["transformer"][1]


def test_the_operator_that_differs_is_named(
    pair: Pair, expected: list[np.ndarray]
) -> None:
    target = target_with(None)
    override = OpOverride(
        targets=("torch.rsqrt", "torch.ops.aten.rsqrt"),
        make=lambda context: lambda x: 1.01 * jax.lax.rsqrt(x),
        owner="a test",
        reason="to be found",
    )
    found = pair.compare(
        replace(target, overrides=(*target.overrides, override)), expected
    )
    place = "text_encoder.encoder.block.0.layer.0.layer_norm (T5LayerNorm)"
    assert (found.part, found.op) == (place, "rsqrt")


def test_a_module_that_is_refused_is_told_by_line(
    pair: Pair, expected: list[np.ndarray]
) -> None:
    def asks(upstream: Any) -> Any:
        return lambda self, x: upstream(self, x if x.sum() > 0 else -x)

    found = pair.compare(target_with(asks), expected)
    assert not found.equal
    assert "transformer" in found.error
    assert "test_compared.py" in found.error


def scaled(block: Any) -> None:
    """A weight is 0.5 % too large."""
    block.ff.net[2].weight.data *= 1.005


def wrong_eps(block: Any) -> None:
    """A norm's eps is ten times as large."""
    block.norm1.eps *= 10


@pytest.mark.parametrize(
    ("fault", "part"), [(scaled, "ff.net.2 (Linear)"), (wrong_eps, "norm1 (RMSNorm)")]
)
def test_a_small_fault_in_one_block_is_named(
    pair: Pair,
    expected: list[np.ndarray],
    fault: Callable[[Any], None],
    part: str,
) -> None:
    """Over 10 s: as above. Of the whole call a wrong eps changes 2e-6."""
    ours = copy.deepcopy(pair.ours)
    fault(ours.transformer.transformer_blocks[1])
    found = replace(pair, ours=ours).compare(target_with(None), expected)
    assert found.first == "transformer"
    assert found.part == f"transformer.transformer_blocks.1.{part}"
    assert found.apart > 2 * found.allowed
    if fault is wrong_eps:
        assert found.calls["transformer"][1] < MOST / 10


def hooked(pair: Pair, hook: Callable[..., Any]) -> Pair:
    """Both pipelines with a hook before the last layer of the transformer."""
    both = [copy.deepcopy(each) for each in (pair.ours, pair.theirs)]
    for one in both:
        one.transformer.proj_out.register_forward_pre_hook(hook)
    return replace(pair, ours=both[0], theirs=both[1])


def test_a_call_that_does_not_run_in_float64_is_listed(
    pair: Pair, expected: list[np.ndarray]
) -> None:
    def asks(module: torch.nn.Module, args: tuple[torch.Tensor]) -> None:
        assert args[0].dtype == torch.float32

    found = hooked(pair, asks).compare(target_with(None), expected)
    assert found.equal
    assert found.unmeasured == ["transformer"]
    assert found.whole == found.empty == []
    # Of each call the result, and the video.
    assert found.tensors == sum(count for count, _ in found.calls.values()) + 1


def test_upstreams_own_nan_is_refused_by_name(pair: Pair) -> None:
    def spoils(module: torch.nn.Module, args: tuple[torch.Tensor]) -> Any:
        return (args[0] * float("nan"),)

    spoilt = hooked(pair, spoils)
    found = spoilt.compare(target_with(None), spoilt.expected())
    assert not found.equal
    assert "upstream's own LTXPipeline makes NaN, first in transformer" in found.error


def test_a_pipeline_that_makes_no_numbers_is_refused(pair: Pair) -> None:
    found = pair.compare(target_with(None), [np.array(["a name"])])
    assert not found.equal
    assert "makes no numbers to compare" in found.error


def test_a_copy_shares_no_tensor_and_no_list() -> None:
    given = ([torch.zeros(2)], {"a": torch.ones(1)})
    (inner,), kept = copied(given)
    inner += 1
    kept["b"] = 1
    assert not given[0][0].any()
    assert "b" not in given[1]
