"""Wan's native blocks against upstream's own code, on one device and on several."""

from __future__ import annotations

import tempfile
from typing import Any

import diffusers
import pytest
import torch

import tpuport
from tests.models.ported import records_of
from tests.processes import run_program
from tests.tolerances import TOLERANCES
from tpuport.core.layers.joint_sequence import JointSequence
from tpuport.core.seam.ported import seam_of
from tpuport.plugins import get_model

SIZES: dict[str, Any] = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "text_dim": 32,
    "freq_dim": 64,
    "ffn_dim": 96,
    "num_layers": 3,
    "rope_max_seq_len": 32,
}
KINDS: dict[str, dict[str, Any]] = {
    "2.1 t2v": {},
    "2.1 i2v": {"in_channels": 36, "image_dim": 40, "added_kv_proj_dim": 64},
    "2.2 5b": {"in_channels": 48, "out_channels": 48},
    "no norm before text": {"cross_attn_norm": False},
}


def make(kind: str = "2.1 t2v", **changed: Any) -> Any:
    torch.manual_seed(1)
    model = diffusers.WanTransformer3DModel(**SIZES | KINDS[kind] | changed).eval()
    with torch.no_grad():  # norms that do something
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def inputs(kind: str, batch: int) -> dict[str, Any]:
    """Three frames of five by seven tokens, which neither two nor eight divide."""
    torch.manual_seed(2)
    channels = KINDS[kind].get("in_channels", 16)
    given: dict[str, Any] = {
        "hidden_states": torch.randn(batch, channels, 3, 10, 14),
        "timestep": torch.tensor([500.0, 20.0])[:batch],
        "encoder_hidden_states": torch.randn(batch, 24, 32),
    }
    if "i2v" in kind:
        given["encoder_hidden_states"] = torch.randn(batch, 512, 32)
        given["encoder_hidden_states_image"] = torch.randn(batch, 17, 40)
    if "5b" in kind:  # the first frame is given
        given["timestep"] = torch.full((batch, 105), 700.0)
        given["timestep"][:, :35] = 0
    return given


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert found.shape == expected.shape
    return float((found - expected).abs().max() / expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("mesh", "batch"),
    [
        ("dp=1", 2),
        ("dp=2", 1),
        ("sp=2", 1),
        ("sp=3", 2),
        ("sp=8", 1),
        ("dp=2,sp=2,tp=2", 2),
    ],
)
def test_every_kind_is_upstreams(kind: str, mesh: str, batch: int) -> None:
    module, given = make(kind), inputs(kind, batch)
    program = tpuport.port(module, mesh=mesh)
    found, expected = program(**given).sample, module(**given).sample
    assert apart(found, expected) <= TOLERANCES["component float32"]
    assert records_of(program)[0].padded is not None


@torch.no_grad()
@pytest.mark.parametrize("kind", ["2.1 i2v", "2.2 5b"])
def test_tokens_last_as_on_a_tpu_gives_the_same(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JointSequence, "feature_major", property(lambda self: True))
    module, given = make(kind), inputs(kind, 1)
    found = tpuport.port(module, mesh="sp=3,tp=2")(**given).sample
    assert apart(found, module(**given).sample) <= TOLERANCES["component float32"]


@torch.no_grad()
def test_both_calls_of_a_guided_step_run_as_one() -> None:
    module, given = make(), inputs("2.1 t2v", 1)
    other = given | {"encoder_hidden_states": torch.randn(1, 24, 32)}
    program = tpuport.port(module, mesh="dp=2,sp=2")
    answers = [program(**one).sample for one in (given, other)]
    for found, one in zip(answers, (given, other), strict=True):
        assert apart(found, module(**one).sample) <= TOLERANCES["component float32"]
    ((traced,),) = (entry.programs for entry in seam_of(program).entries.values())
    assert [any(differ) for differ in traced.runs] == [True]


@torch.no_grad()
def errors_in_bfloat16(kind: str) -> list[float]:
    """How far native blocks and the general port are from float32, on the mean.

    Upstream's loader keeps norms, tables and the time embedder in float32.
    """
    load = diffusers.WanTransformer3DModel.from_pretrained
    with tempfile.TemporaryDirectory() as folder:
        make(kind).save_pretrained(folder)
        module = load(folder, torch_dtype=torch.bfloat16)
        exact = load(folder, torch_dtype=torch.bfloat16).float()
    assert module.blocks[0].scale_shift_table.dtype == torch.float32
    given = {
        name: tensor.to(torch.bfloat16) if "states" in name else tensor
        for name, tensor in inputs(kind, 1).items()
    }
    expected = exact(**{name: tensor.float() for name, tensor in given.items()}).sample
    ports = (tpuport.port(module, blocks=blocks) for blocks in ("native", "upstream"))
    return [float((p(**given).sample - expected).abs().mean()) for p in ports]


@pytest.mark.parametrize("kind", ["2.1 t2v", "2.2 5b"])
def test_bfloat16_is_no_further_from_float32_than_the_general_port(kind: str) -> None:
    """In a process of its own: XLA reads the flag once.

    Without the flag XLA for the CPU leaves roundings out, of weights and inputs of
    products too, which no TPU can.
    """
    code = f"from {__name__} import *; print(*errors_in_bfloat16({kind!r}))"
    lines = run_program(code, XLA_FLAGS="--xla_allow_excess_precision=false")
    native, general = map(float, lines[-1].split())
    assert native <= general


@torch.no_grad()
def test_another_norm_of_queries_and_keys_runs_as_any_module() -> None:
    module, given = make(qk_norm="rms_norm"), inputs("2.1 t2v", 1)
    program = tpuport.port(module, mesh="sp=2")
    assert apart(program(**given).sample, module(**given).sample) <= 1e-5
    (entry,) = seam_of(program).entries.values()
    assert entry.target.blocks == "upstream"


def test_published_configs_build_their_classes() -> None:
    billions = {"1.3b": (1.3, 1.5), "-5b": (4.9, 5.1), "14b": (14, 17)}
    for name, one in get_model("wan").variants.items():
        least, most = next(billions[size] for size in billions if size in name)
        for component, values in one.read().items():
            if component.startswith("transformer"):
                with torch.device("meta"):
                    module = diffusers.WanTransformer3DModel(**values)
                count = sum(tensor.numel() for tensor in module.parameters())
                assert least < count / 1e9 < most
