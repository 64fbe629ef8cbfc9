"""Native blocks, and upstream's with the patches, against upstream's own code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.models.hunyuanvideo.transformers import (
    GLYPHS,
    IMAGE,
    KINDS,
    TEXT,
    VIDEO,
    apart,
    form,
    inputs,
    make,
    ported,
)
from tests.models.ported import plan_of, records_of
from tests.tolerances import TOLERANCES
from tpuport.core.enums import Blocks
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.seam.entry import PortError
from tpuport.core.seam.ported import seam_of

ATOL = TOLERANCES["component float32"]
BOTH = ("1.5 i2v", "13b t2v")
sweep = pytest.mark.sweep


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "mesh",
    [
        "dp=2,sp=2,tp=2",
        # sp divides no sequence: text is on two devices, or past the end of one.
        "sp=4,tp=2",
        *(pytest.param(m, marks=sweep) for m in ("dp=1", "sp=3", "sp=5", "sp=8")),
    ],
)
def test_native_blocks_are_upstreams_on(mesh: str, kind: str) -> None:
    module, given = make(kind), inputs(kind)
    program = ported(module, kind, mesh)
    assert apart(program(**given), module(**given)) <= ATOL
    # Both kinds of blocks attend to the same sequence.
    (record,) = [one for one in records_of(program) if one.padded]
    tokens = VIDEO + TEXT + (GLYPHS + IMAGE) * (form(kind) == "1.5")
    sizes = dict(part.split("=") for part in mesh.split(","))
    sp = int(sizes.get("sp", 1))
    assert record.key[2] == tokens
    assert record.padded == -(-tokens // sp) * sp
    assert record.key_lengths
    names = [n if int(sizes.get(n, 1)) > 1 else None for n in ("dp", "tp", "sp")]
    assert record.split == (*names, None)
    if "tp" in sizes and form(kind) == "13b":
        plan = plan_of(program)
        assert plan.bytes_per_device < 0.6 * plan.total_bytes


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in BOTH])
def test_every_kind_is_upstreams(kind: str) -> None:
    module, given = make(kind), inputs(kind)
    program = ported(module, kind, "sp=5")
    assert apart(program(**given), module(**given)) <= ATOL


@pytest.mark.parametrize("kind", KINDS)
def test_upstreams_blocks_with_the_patches(kind: str) -> None:
    module, given = make(kind), inputs(kind)
    meshes = {"1.5 i2v": "dp=2,sp=2,tp=2", "13b t2v": "sp=3"}
    program = ported(module, kind, meshes.get(kind, "dp=1"), Blocks.UPSTREAM)
    assert apart(program(**given), module(**given)) <= ATOL
    joint = [one for one in records_of(program) if one.query[2] >= VIDEO]
    assert {one.key_lengths for one in joint} == {True}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("layout", ["replicated-attention", "replicated-out"])
def test_other_layouts_give_the_same(kind: str, layout: str) -> None:
    module, given = make(kind), inputs(kind, batch=1)
    program = ported(module, kind, "tp=4", layout=layout)
    assert apart(program(**given), module(**given)) <= ATOL
    usual = ported(module, kind, "tp=4")
    usual(**given)
    assert plan_of(program).bytes_per_device > plan_of(usual).bytes_per_device


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("mesh", ["dp=1", "sp=3"])
def test_tokens_last_as_on_a_tpu_gives_the_same(
    kind: str, mesh: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JointSequence, "feature_major", property(lambda self: True))
    module, given = make(kind), inputs(kind)
    assert apart(ported(module, kind, mesh)(**given), module(**given)) <= ATOL


def test_two_calls_of_a_guided_step_run_as_one() -> None:
    """On two halves of the mesh, with text of other lengths."""
    kind = "1.5 t2v"
    module, given = make(kind), inputs(kind)
    calls = [{name: x[i : i + 1] for name, x in given.items()} for i in range(2)]
    program = ported(module, kind, "dp=2,sp=2")
    answers = [program(**one) for one in calls]
    for found, one in zip(answers, calls, strict=True):
        assert apart(found, module(**one)) <= ATOL
    ((traced,),) = (entry.programs for entry in seam_of(program).entries.values())
    assert [any(differ) for differ in traced.runs] == [True]


@pytest.mark.parametrize("kind", BOTH)
def test_what_padding_holds_does_not_matter_and_what_is_valid_does(kind: str) -> None:
    given, program = inputs(kind), ported(make(kind), kind)
    expected = program(**given)
    states, mask = "encoder_hidden_states", given["encoder_attention_mask"][..., None]
    noise = torch.full_like(given[states], 1e4)
    padded = given | {states: given[states].where(mask.bool(), noise)}
    assert torch.equal(program(**padded).sample, expected.sample)
    turned = given[states].flip(-1).where(mask.bool(), given[states])
    assert apart(program(**given | {states: turned}), expected) > 1e-3


@pytest.mark.parametrize("blocks", Blocks)
@pytest.mark.parametrize("kind", BOTH)
def test_a_mask_is_counted_in_integers(kind: str, blocks: Blocks) -> None:
    """257 ones are 256 in bfloat16, which upstream's pipelines cast masks to."""
    module, given = make(kind), inputs(kind, batch=1, text=260)
    mask = (torch.arange(260) < 257)[None].long()
    expected = module(**given | {"encoder_attention_mask": mask})
    low = given | {"encoder_attention_mask": mask.bfloat16()}
    assert apart(ported(module, kind, blocks=blocks)(**low), expected) <= ATOL


#: Rows of valid tokens. Upstream counts them and takes that many from the front.
MASKS = {
    "holes": [[1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 1] + [0] * 6],
    "left padded": [[0] * 4 + [1] * 7, [0] * 9 + [1] * 2],
}


@pytest.mark.parametrize("name", MASKS)
def test_any_mask_of_13b_is_read_as_upstream_reads_it(name: str) -> None:
    kind = "13b t2v"
    given = inputs(kind) | {"encoder_attention_mask": torch.tensor(MASKS[name])}
    module = make(kind)
    assert apart(ported(module, kind)(**given), module(**given)) <= ATOL


def _low(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    return {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}


@pytest.mark.parametrize("kind", BOTH)
def test_bfloat16_is_no_further_off_than_upstreams(kind: str) -> None:
    module = make(kind)
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter) * 0.05)
    module = module.bfloat16()
    exact, ours = copy.deepcopy(module).float(), ported(module, kind, "sp=2")
    errors = [0.0, 0.0]
    for seed in range(3):
        torch.manual_seed(seed)
        given = inputs(kind)
        for name in ("hidden_states", "encoder_hidden_states"):
            given[name] = torch.randn_like(given[name])
        given = _low(given, torch.bfloat16)
        expected = exact(**_low(given, torch.float32)).sample
        for place, one in enumerate((module, ours)):
            found = one(**given).sample
            assert found.dtype == torch.bfloat16
            errors[place] += float((found.float() - expected).square().mean())
    assert 0 < errors[1] <= errors[0] * 1.05**2


@pytest.mark.parametrize("kind", BOTH)
def test_attention_kwargs_are_refused(kind: str) -> None:
    program = ported(make(kind), kind)
    with pytest.raises(PortError, match="scale; run with blocks='upstream'"):
        program(**inputs(kind, batch=1), attention_kwargs={"scale": 0.5})
