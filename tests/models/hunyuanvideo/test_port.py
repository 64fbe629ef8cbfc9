"""``tpuport.port`` on bare modules of both HunyuanVideo forms, called as upstream's."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import tpuport
from tests.models.hunyuanvideo import test_encoders as encoders
from tests.models.hunyuanvideo.blocks import test_transformer as form_15
from tests.models.hunyuanvideo.blocks import test_transformer_13b as form_13b
from tests.models.ported import plan_of
from tests.tolerances import TOLERANCES
from tpuport.core.seam.ported import seam_of
from tpuport.errors import MeshError, UsageError

port = functools.partial(tpuport.port, model="hunyuanvideo")

#: In upstream's order of arguments.
ORDER_15: tuple[str, ...] = (
    "hidden_states",
    "timestep",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "timestep_r",
    "encoder_hidden_states_2",
    "encoder_attention_mask_2",
    "image_embeds",
)
ORDER_13B: tuple[str, ...] = (
    "hidden_states",
    "timestep",
    "encoder_hidden_states",
    "encoder_attention_mask",
    "pooled_projections",
    "guidance",
)


@pytest.fixture(autouse=True)
def _no_gradients() -> Any:
    with torch.no_grad():
        yield


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, tolerance: str = "component float32"
) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    assert float((found - expected).abs().max()) <= TOLERANCES[tolerance]


# ---------------------------------------------------------------- transformers


@functools.cache
def ported(form: str) -> tuple[Any, Any]:
    """A small transformer and the same ported, whose programs tests share."""
    module = form_15.make() if form == "1.5" else form_13b.make()
    return module, port(module)


BATCHES = [pytest.param(1, marks=pytest.mark.sweep), 2]


@pytest.mark.parametrize("batch", BATCHES)
def test_15_is_upstreams_from_text_and_from_an_image(batch: int) -> None:
    module, program = ported("1.5")
    made = []
    for task in ("t2v zeros", "i2v"):
        inputs = form_15.inputs_of(batch, task)
        ours, theirs = program(**inputs), module(**inputs)
        assert type(ours) is type(theirs)
        assert_close(ours.sample, theirs.sample)
        made.append(ours.sample)
    assert float((made[0] - made[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("batch", BATCHES)
def test_13b_is_upstreams(batch: int) -> None:
    module, program = ported("13b")
    inputs = form_13b.inputs_of(batch)
    ours, theirs = program(**inputs), module(**inputs)
    assert type(ours) is type(theirs)
    assert_close(ours.sample, theirs.sample)
    other = program(**{**inputs, "guidance": inputs["guidance"] * 2}).sample
    assert float((other - ours.sample).abs().max()) > 1e-3


#: Of each form, another legal config and the inputs for it.
CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "1.5 meanflow, patches, layer norm": (
        "1.5",
        {"use_meanflow": True, "patch_size": 2, "qk_norm": "layer_norm"},
        {"size": (2, 4, 8)},
    ),
    "13b patches in time, no guidance, no single blocks": (
        "13b",
        {"patch_size_t": 2, "guidance_embeds": False, "num_single_layers": 0},
        {"size": (4, 8, 12)},
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_arguments_by_position_and_a_tuple_back(name: str) -> None:
    form, changes, options = CONFIGS[name]
    if form == "1.5":
        module = form_15.make(**{"num_layers": 1, **changes})
        inputs = form_15.inputs_of(2, "i2v", **options)
        order = ORDER_15
        if "use_meanflow" in changes:
            inputs["timestep_r"] = torch.tensor([250.0, 12.0])
    else:
        few = {"num_layers": 1, "num_single_layers": 1}
        module = form_13b.make(**{**few, **changes})
        inputs = form_13b.inputs_of(2, **options)
        order = ORDER_13B
        if "guidance_embeds" in changes:
            del inputs["guidance"]
    assert set(inputs) <= set(order)
    # Then attention_kwargs and return_dict.
    arguments = (*(inputs.get(name) for name in order), None, False)
    ours, theirs = port(module)(*arguments), module(*arguments)
    assert type(ours) is tuple
    assert_close(ours[0], theirs[0])


@pytest.mark.parametrize(
    "sharding",
    [pytest.param("default", marks=pytest.mark.sweep), "replicated-attention"],
)
@pytest.mark.parametrize("form", ["1.5", "13b"])
def test_on_a_mesh(form: str, sharding: str) -> None:
    module, single = ported(form)
    two = form_15.inputs_of(2, "i2v") if form == "1.5" else form_13b.inputs_of(2)
    many = port(module, mesh="dp=2,tp=4", sharding=sharding)
    found = many(**two).sample
    assert_close(found, single(**two).sample, "mesh float32")
    assert_close(found, module(**two).sample)
    plan = plan_of(many)
    assert plan.layout == sharding
    assert plan.bytes_per_device < plan.total_bytes
    assert (plan.extra_bytes_per_device > 0) == (sharding != "default")


def test_a_mesh_or_a_layout_that_does_not_fit() -> None:
    module, _ = ported("1.5")
    with pytest.raises(MeshError, match="tp=3 does not divide"):
        port(module, mesh="tp=3")
    with pytest.raises(UsageError, match="replicated-attention"):
        port(module, sharding="replicated")


# ---------------------------------------------------------------- autoencoders


@functools.cache
def frozen_vae(name: str) -> Any:
    from diffusers import AutoencoderKLHunyuanVideo, AutoencoderKLHunyuanVideo15

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "block_out_channels": (8, 8, 8),
        "latent_channels": 4,
        "layers_per_block": 1,
        "spatial_compression_ratio": 4,
    }
    if name == "1.5":
        return AutoencoderKLHunyuanVideo15(**common).eval()
    vae = AutoencoderKLHunyuanVideo(
        down_block_types=("HunyuanVideoDownBlock3D",) * 3,
        up_block_types=("HunyuanVideoUpBlock3D",) * 3,
        norm_num_groups=4,
        **common,
    ).eval()
    # Nearer to the [-1, 1] that a trained decoder ends in.
    vae.decoder.conv_out.conv.weight.data.mul_(0.3)
    vae.decoder.conv_out.conv.bias.data.mul_(0.3)
    return vae


def make_vae(name: str) -> Any:
    """An autoencoder of three levels whose settings a test may change."""
    frozen = frozen_vae(name)
    vae = type(frozen).from_config(frozen.config).eval()
    vae.load_state_dict(frozen.state_dict())
    return vae


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def one_by_one(method: Any, x: torch.Tensor) -> torch.Tensor:
    """What upstream makes, whose 1.5 autoencoder fails for more than one video."""
    return torch.cat([method(row).sample for row in x.split(1)])


@pytest.mark.parametrize("name", ["1.5", "13b"])
def test_decode_of_one_and_of_two_videos(name: str) -> None:
    vae = make_vae(name)
    program = port(vae)
    z = randn(2, 4, 2, 4, 3)
    expected = one_by_one(vae.decode, z)
    assert expected.shape == (2, 3, 5, 16, 12)
    ours = program.decode(z[:1])
    assert type(ours) is type(vae.decode(z[:1]))
    assert_close(ours.sample, expected[:1])
    (both,) = program.decode(z, return_dict=False)
    assert_close(both, expected)


@pytest.mark.parametrize("name", ["1.5", "13b"])
def test_forward_is_there_and_back(name: str) -> None:
    vae = make_vae(name)
    video = randn(2, 3, 5, 16, 12).clamp(-1, 1)
    assert_close(port(vae)(video).sample, one_by_one(vae, video))


@pytest.mark.parametrize("name", ["1.5", "13b"])
def test_tiling_of_the_module_is_kept(name: str) -> None:
    # All tiles are in one program: sessions, which have many, run one after another.
    vae = make_vae(name)
    z = randn(1, 4, 2, 5, 3)
    whole = vae.decode(z).sample
    settings = {"tile_sample_min_height": 16, "tile_sample_min_width": 16}
    if name == "1.5":
        settings |= {"tile_latent_min_height": 4, "tile_latent_min_width": 4}
    else:
        settings |= {"tile_sample_stride_height": 12, "tile_sample_stride_width": 12}
    vae.enable_tiling(**settings)
    expected = vae.decode(z).sample
    assert float((expected - whole).abs().max()) > 1e-3
    assert_close(port(vae).decode(z).sample, expected)


@pytest.mark.parametrize("name", ["1.5", "13b"])
def test_encode_gives_upstreams_distribution(name: str) -> None:
    vae = make_vae(name)
    video = randn(2, 3, 5, 16, 12).clamp(-1, 1)
    found = port(vae).encode(video).latent_dist
    expected = [vae.encode(row).latent_dist for row in video.split(1)]
    assert type(found) is type(expected[0])
    assert_close(found.parameters, torch.cat([x.parameters for x in expected]))
    assert_close(found.mode(), torch.cat([x.mode() for x in expected]))


def test_an_autoencoder_is_whole_on_every_device() -> None:
    vae = make_vae("1.5")
    program = port(vae, mesh="dp=2,tp=4")
    z = randn(1, 4, 2, 4, 3)
    assert_close(program.decode(z).sample, vae.decode(z).sample)
    plans = [entry.plan for entry in seam_of(program).entries.values()]
    assert plans
    assert all(plan.bytes_per_device == plan.total_bytes for plan in plans)


# ------------------------------------------------------------------- encoders

IDS, MASK = encoders.ragged("right", "left")
PADDED = (IDS, {"attention_mask": MASK})
NO_CACHE = (IDS, {"attention_mask": MASK, "use_cache": False})


@pytest.mark.parametrize(
    ("name", "config", "given"),
    [
        pytest.param("Qwen2_5_VLTextModel", encoders.QWEN, NO_CACHE, id="qwen"),
        pytest.param("LlamaModel", encoders.LLAMA, NO_CACHE, id="llama"),
        pytest.param("T5EncoderModel", encoders.BYT5, PADDED, id="byt5"),
        pytest.param("CLIPTextModel", encoders.CLIP, (IDS, {}), id="clip"),
        pytest.param(
            "SiglipVisionModel", encoders.SIGLIP, (randn(2, 3, 56, 56), {}), id="siglip"
        ),
    ],
)
def test_an_encoder_is_upstreams(
    name: str, config: dict[str, Any], given: tuple[torch.Tensor, dict[str, Any]]
) -> None:
    module = encoders.make(name, config)
    x, options = given
    ours, theirs = port(module)(x, **options), module(x, **options)
    assert type(ours) is type(theirs)
    assert_close(ours.last_hidden_state, theirs.last_hidden_state)
