"""Each component against upstream's own code on the CPU in float32."""

from __future__ import annotations

import pytest
import torch

import tpuport
from tests.models.conftest import (
    FORMS,
    IMAGE_FORMS,
    make_transformer,
    make_vae,
)
from tests.models.ported import records_of
from tests.tolerances import TOLERANCES

ATOL = TOLERANCES["component float32"]
ALL_FORMS = {**FORMS, **IMAGE_FORMS}


def assert_close(ours: torch.Tensor, upstream: torch.Tensor) -> None:
    assert ours.shape == upstream.shape
    assert ours.dtype == upstream.dtype
    assert float((ours - upstream).abs().max()) <= ATOL


def transformer_inputs(
    form: str,
    batch: int,
    rows: int = 12,
    columns: int = 16,
    frames: int = 3,
    head_dim: int = 16,
) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    config = ALL_FORMS[form]
    if "learned" in " ".join(config):
        rows, columns = config["sample_height"], config["sample_width"]
    patch_t = config.get("patch_size_t") or 1
    frames += -frames % patch_t
    tokens = frames // patch_t * (rows // 2) * (columns // 2)
    inputs: dict[str, object] = {
        "hidden_states": torch.randn(
            batch,
            frames,
            config.get("in_channels", 4),
            rows,
            columns,
            generator=generator,
        ),
        "encoder_hidden_states": torch.randn(batch, 20, 32, generator=generator),
        "timestep": torch.full((batch,), 499),
    }
    if config["use_rotary_positional_embeddings"]:
        angles = torch.randn(tokens, head_dim, generator=generator)
        inputs["image_rotary_emb"] = (angles.cos(), angles.sin())
    if "ofs_embed_dim" in config:
        inputs["ofs"] = torch.full((1,), 2.0)
    return inputs


@torch.no_grad()
@pytest.mark.parametrize(
    ("batch", "mesh"),
    [
        pytest.param(1, "dp=1", marks=pytest.mark.sweep),
        (2, "dp=1"),
        (2, "sp=3"),
        (2, "dp=2,sp=2,tp=2"),
    ],
)
@pytest.mark.parametrize("form", ALL_FORMS)
def test_the_transformer_is_upstreams(form: str, batch: int, mesh: str) -> None:
    """On all axes, and in uneven parts."""
    module = make_transformer(form)
    inputs = transformer_inputs(form, batch)
    program = tpuport.port(module, mesh=mesh)
    ours, upstream = program(**inputs), module(**inputs)
    assert type(ours) is type(upstream)
    assert_close(ours.sample, upstream.sample)
    assert float(upstream.sample.std()) > 0.05
    # One joint sequence: the native blocks ran.
    (record,) = records_of(program)
    assert record.padded is not None


@torch.no_grad()
def test_learned_positions_and_the_offset_count() -> None:
    module = make_transformer("5b-i2v")
    inputs = transformer_inputs("5b-i2v", 1)
    learned = tpuport.port(module)(**inputs).sample
    module.patch_embed.pos_embedding.zero_()
    assert float((tpuport.port(module)(**inputs).sample - learned).abs().max()) > 0.01
    program = tpuport.port(make_transformer("1.5-5b-i2v"))
    inputs = transformer_inputs("1.5-5b-i2v", 1)
    offset = program(**inputs).sample
    inputs["ofs"] = torch.full((1,), 100.0)
    assert float((program(**inputs).sample - offset).abs().max()) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("form", ["2b", "5b", "5b-i2v"])
def test_another_size_than_the_trained_one(form: str) -> None:
    """2b computes its positions inside forward; learned ones give way to sin-cos."""
    module = make_transformer(form)
    inputs = transformer_inputs(form, 1, rows=8, columns=20, frames=5)
    assert_close(tpuport.port(module)(**inputs).sample, module(**inputs).sample)


@torch.no_grad()
@pytest.mark.parametrize(
    "frames", [1, *(pytest.param(n, marks=pytest.mark.sweep) for n in (2, 3)), 5]
)
def test_vae_decode_is_upstreams(frames: int) -> None:
    module = make_vae()
    z = torch.randn(1, 4, frames, 8, 12, generator=torch.Generator().manual_seed(2))
    ours = tpuport.port(module).decode(z)
    assert_close(ours.sample, module.decode(z).sample)


@torch.no_grad()
def test_vae_decode_is_no_further_from_the_truth_than_upstream() -> None:
    module = make_vae()
    z = torch.randn(1, 4, 3, 8, 12, generator=torch.Generator().manual_seed(2))
    ours = tpuport.port(module).decode(z).sample
    upstream = module.decode(z).sample
    truth = module.double().decode(z.double()).sample
    error = float((ours - truth).abs().max())
    assert error <= 2 * float((upstream - truth).abs().max())


def test_a_module_of_no_component_class_is_refused() -> None:
    with pytest.raises(tpuport.TpuportError, match="no module of class Linear"):
        tpuport.port(torch.nn.Linear(2, 2), model="cogvideox")
