"""The encoders of HunyuanVideo and what they read, against upstream's own code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.spec.component import Component
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.skeleton import build_skeleton, match_names
from tpuport.models.hunyuanvideo import encoders, inputs
from tpuport.patches.conv import CONVOLUTION
from tpuport.patches.norms import FLOAT32_NORMS
from tpuport.patches.resize import NEAREST_RESIZE
from tpuport.patches.torchax_slices import SLICE_ASSIGNMENT

ATOL = TOLERANCES["component float32"]

LLM = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "initializer_range": 0.08,
}
QWEN = {
    **LLM,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rope_theta": 1000000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
}
LLAMA = {**LLM, "rope_theta": 500000.0, "rope_scaling": None}
BYT5 = {
    "vocab_size": 384,
    "d_model": 48,
    "d_kv": 8,
    "d_ff": 96,
    "num_layers": 3,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 56,
    "patch_size": 14,
}
CLIP = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "projection_dim": 48,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 1,
}


def component(class_name: str) -> Component:
    return Component(
        name="encoder",
        class_path=f"transformers:{class_name}",
        sharding=(),
        stored_prefix=encoders.STORED_PREFIXES.get(class_name, ""),
    )


def make(class_name: str, config: dict[str, Any]) -> torch.nn.Module:
    """Upstream's module with random weights."""
    import transformers

    cls = getattr(transformers, class_name)
    torch.manual_seed(0)
    module: torch.nn.Module = cls(cls.config_class.from_dict(dict(config))).eval()
    return module


def load(folder: Path, class_name: str) -> tuple[PortedModule, dict[str, Any]]:
    """A component as a session loads it: a skeleton, and tensors from the files."""
    part = component(class_name)
    config = json.loads((folder / "config.json").read_text())
    module = build_skeleton(part, config)
    runtime = model_runtime(
        mesh=None,
        platform="cpu",
        patches=SLICE_ASSIGNMENT,
        overrides=(*FLOAT32_NORMS, NEAREST_RESIZE, CONVOLUTION),
        matmul_precision="highest",
    )
    ported = PortedModule(module, runtime)
    files = load_file(folder / "model.safetensors")
    found = match_names("test", part, files, ported.names.tied, ported.names.stored)
    weights = {name: to_numpy(files[stored]) for name, stored in found.items()}
    buffers = dict(module.named_buffers())
    weights |= {name: to_numpy(buffers[name]) for name in ported.names.computed}
    return ported, weights


def run(
    loaded: tuple[PortedModule, dict[str, Any]],
    function: Callable[..., jax.Array],
    *tensors: torch.Tensor,
) -> torch.Tensor:
    """``function`` as a compiled program."""
    ported, weights = loaded
    program = jax.jit(lambda w, given: function(ported.bind(w), *given))
    return to_torch(program(weights, [to_numpy(t) for t in tensors]))


def saved(folder: Path, module: Any) -> Path:
    module.save_pretrained(folder)
    return folder


def assert_close(ours: torch.Tensor, upstream: torch.Tensor) -> None:
    assert ours.shape == upstream.shape
    assert ours.dtype == upstream.dtype
    assert bool(torch.isfinite(ours).all())
    assert float((ours - upstream).abs().max()) <= ATOL


#: How many of the 24 tokens are padding, and on which side.
PADDED = {"right": slice(15, 24), "left": slice(0, 4), "all": slice(0, 24)}


def ragged(*sides: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask [rows, 24], each row padded on its side."""
    shape = (len(sides), 24)
    ids = torch.randint(3, 300, shape, generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    for row, side in enumerate(sides):
        ids[row, PADDED[side]] = 0
        mask[row, PADDED[side]] = 0
    return ids, mask


# -------------------------------------------------------------------- encoders


@torch.no_grad()
@pytest.mark.parametrize(
    "sides",
    [
        ("all", "right", "left"),
        *(
            pytest.param(sides, marks=pytest.mark.sweep)
            for sides in (("right",), ("left",), ("right", "left"))
        ),
    ],
    ids="-".join,
)
@pytest.mark.parametrize(
    ("class_name", "config", "function"),
    [
        pytest.param("Qwen2_5_VLTextModel", QWEN, encoders.language_states, id="qwen"),
        pytest.param("LlamaModel", LLAMA, encoders.language_states, id="llama"),
    ],
)
def test_language_model_states_are_upstreams(
    tmp_path: Path,
    class_name: str,
    config: dict[str, Any],
    function: Callable[..., jax.Array],
    sides: tuple[str, ...],
) -> None:
    module = make(class_name, config)
    ids, mask = ragged(*sides)
    upstream = module(
        input_ids=ids, attention_mask=mask, output_hidden_states=True
    ).hidden_states[-3]
    ours = run(load(saved(tmp_path, module), class_name), function, ids, mask)
    # Positions of padding included: there upstream's are finite too, and the same.
    assert_close(ours, upstream)
    if sides[-1] == "left":
        unmasked = module(input_ids=ids, output_hidden_states=True).hidden_states[-3]
        assert float((unmasked - upstream)[-1, 4:].abs().max()) > 100 * ATOL


@torch.no_grad()
@pytest.mark.parametrize(
    "sides",
    [
        ("right", "all"),
        pytest.param(("right",), marks=pytest.mark.sweep),
        pytest.param(("right", "right"), marks=pytest.mark.sweep),
    ],
    ids="-".join,
)
def test_byt5_states_are_upstreams(tmp_path: Path, sides: tuple[str, ...]) -> None:
    module = make("T5EncoderModel", BYT5)
    ids, mask = ragged(*sides)
    upstream = module(input_ids=ids, attention_mask=mask.float())[0]
    # A prompt that quotes nothing: upstream gives zeros without running the encoder.
    upstream[~mask.bool().any(dim=1)] = 0
    folder = saved(tmp_path, module)
    ours = run(load(folder, "T5EncoderModel"), encoders.byt5_states, ids, mask)
    assert_close(ours, upstream)
    unmasked = module(input_ids=ids)[0]
    assert float((unmasked - upstream)[0, :15].abs().max()) > 100 * ATOL


@torch.no_grad()
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_siglip_states_are_upstreams(tmp_path: Path, rows: int) -> None:
    module = make("SiglipVisionModel", SIGLIP)
    pixels = torch.randn(
        rows, 3, 56, 56, generator=torch.Generator().manual_seed(2)
    ).clamp(-1, 1)
    upstream = module(pixel_values=pixels).last_hidden_state
    folder = saved(tmp_path, module)
    ours = run(load(folder, "SiglipVisionModel"), encoders.siglip_states, pixels)
    assert_close(ours, upstream)


@torch.no_grad()
@pytest.mark.parametrize("rows", [pytest.param(1, marks=pytest.mark.sweep), 2])
@pytest.mark.parametrize(
    ("eos", "text_end"),
    [
        # The config of published checkpoints: the end is the highest id of a row.
        pytest.param(2, 299, id="old config"),
        pytest.param(50, 50, id="new config"),
    ],
)
def test_the_pooled_state_is_upstreams(
    tmp_path: Path, rows: int, eos: int, text_end: int
) -> None:
    module = make("CLIPTextModel", {**CLIP, "eos_token_id": eos})
    ids = torch.randint(60, 250, (rows, 77), generator=torch.Generator().manual_seed(3))
    for row in range(rows):
        ids[row, 20 + 30 * row :] = text_end
    upstream = module(input_ids=ids)
    ends = torch.tensor([20, 50][:rows])
    at_end = upstream.last_hidden_state[torch.arange(rows), ends]
    assert torch.equal(upstream.pooler_output, at_end)
    folder = saved(tmp_path, module)
    ours = run(load(folder, "CLIPTextModel"), encoders.clip_pooled, ids)
    assert_close(ours, upstream.pooler_output)


@pytest.mark.parametrize(
    ("class_name", "config", "buffers"),
    [
        pytest.param(
            "Qwen2_5_VLTextModel",
            {
                "hidden_size": 3584,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
                "num_hidden_layers": 1,
                "rope_theta": 1000000.0,
                "rope_scaling": {
                    "mrope_section": [16, 24, 24],
                    "rope_type": "default",
                    "type": "default",
                },
                "torch_dtype": "bfloat16",
            },
            {"rotary_emb.inv_freq": 1e6 ** -(np.arange(0, 128, 2) / 128)},
            id="qwen",
        ),
        pytest.param(
            "LlamaModel",
            {
                "hidden_size": 4096,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "num_hidden_layers": 1,
                "rope_theta": 500000.0,
                "rope_scaling": None,
                "torch_dtype": "float16",
            },
            {"rotary_emb.inv_freq": 5e5 ** -(np.arange(0, 128, 2) / 128)},
            id="llama",
        ),
        pytest.param(
            "SiglipVisionModel",
            {"image_size": 384, "patch_size": 14, "num_hidden_layers": 1},
            {"embeddings.position_ids": np.arange(729)[None]},
            id="siglip",
        ),
        pytest.param(
            "CLIPTextModel",
            {"max_position_embeddings": 77, "num_hidden_layers": 1},
            {"embeddings.position_ids": np.arange(77)[None]},
            id="clip",
        ),
    ],
)
def test_skeletons_of_published_configs(
    class_name: str, config: dict[str, Any], buffers: dict[str, Any]
) -> None:
    # Published configs are of transformers 4: rope_theta at the top, torch_dtype.
    module = build_skeleton(component(class_name), config)
    assert module.config._attn_implementation == "sdpa"
    assert all(p.device.type == "meta" for p in module.parameters())
    found = dict(module.named_buffers())
    for name, values in buffers.items():
        assert found[name].device.type == "cpu"
        np.testing.assert_allclose(found[name].numpy(), values, rtol=1e-6)
        if found[name].is_floating_point():
            assert found[name].dtype == torch.float32
    if class_name.startswith("Qwen"):
        assert module.rotary_emb.mrope_section == [16, 24, 24]


def test_the_layers_after_the_state_are_not_computed(tmp_path: Path) -> None:
    module = make("Qwen2_5_VLTextModel", QWEN)
    ported, weights = load(saved(tmp_path, module), "Qwen2_5_VLTextModel")
    given = [to_numpy(t) for t in ragged("right", "left")]

    def flops(function: Callable[..., Any]) -> float:
        program = jax.jit(lambda w, given: function(ported.bind(w), *given))
        cost = program.lower(weights, given).compile().cost_analysis()
        return float(cost["flops"])

    whole = flops(lambda model, i, m: model(i, attention_mask=m).last_hidden_state)
    assert flops(encoders.language_states) < 0.65 * whole  # three layers of five


# ---------------------------------------------------------------- demo, whole way

PROMPTS = ['a red fox holds "HELLO" and “world”', "", "a giant panda plays guitar"]


@pytest.fixture(scope="module")
def demo_15(hunyuanvideo_folders: dict[str, Path]) -> Checkpoint:
    return Checkpoint(hunyuanvideo_folders["1.5"], "demo")


@pytest.fixture(scope="module")
def demo_13b(hunyuanvideo_folders: dict[str, Path]) -> Checkpoint:
    return Checkpoint(hunyuanvideo_folders["13b"], "demo")


@torch.no_grad()
def test_prompts_of_15_are_encoded_as_upstream_does(demo_15: Checkpoint) -> None:
    from diffusers import HunyuanVideo15ImageToVideoPipeline
    from PIL import Image

    pipe = HunyuanVideo15ImageToVideoPipeline.from_pretrained(demo_15.folder)
    states, mask, glyph_states, glyph_mask = pipe.encode_prompt(
        PROMPTS, device="cpu", batch_size=len(PROMPTS)
    )
    chat = inputs.load_tokenizer(demo_15, "tokenizer", "Qwen2Tokenizer")
    ids, our_mask = inputs.chat_ids(chat, PROMPTS)
    qwen = load(demo_15.folder / "text_encoder", "Qwen2_5_VLTextModel")
    ours = run(qwen, encoders.language_states, ids, our_mask)
    start = inputs.chat_template().crop_start
    assert torch.equal(our_mask[:, start:].float(), mask)
    assert_close(ours[:, start:], states)
    bytes_ = inputs.load_tokenizer(demo_15, "tokenizer_2", "ByT5Tokenizer")
    glyphs, our_glyph_mask, has_glyph = inputs.glyph_ids(bytes_, PROMPTS)
    byt5 = load(demo_15.folder / "text_encoder_2", "T5EncoderModel")
    assert has_glyph.tolist() == [True, False, False]
    assert torch.equal(our_glyph_mask.float(), glyph_mask)
    assert_close(run(byt5, encoders.byt5_states, glyphs, our_glyph_mask), glyph_states)
    noise = np.random.RandomState(0).randint(0, 255, (80, 120, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    seen = pipe.encode_image(image, 1, torch.device("cpu"), torch.float32)
    pixels = inputs.image_pixels(inputs.load_feature_extractor(demo_15), [image])
    siglip = load(demo_15.folder / "image_encoder", "SiglipVisionModel")
    assert_close(run(siglip, encoders.siglip_states, pixels), seen)


@torch.no_grad()
def test_prompts_of_13b_are_encoded_as_upstream_does(demo_13b: Checkpoint) -> None:
    from diffusers import HunyuanVideoPipeline

    llama_tokenizer = inputs.load_tokenizer(demo_13b, "tokenizer", "LlamaTokenizerFast")
    pipe = HunyuanVideoPipeline.from_pretrained(
        demo_13b.folder, tokenizer=llama_tokenizer
    )
    states, pooled, mask = pipe.encode_prompt(PROMPTS, device="cpu")
    ids, our_mask = inputs.llama_ids(llama_tokenizer, PROMPTS)
    llama = load(demo_13b.folder / "text_encoder", "LlamaModel")
    start = inputs.llama_crop()
    assert torch.equal(our_mask[:, start:], mask)
    assert_close(run(llama, encoders.language_states, ids, our_mask)[:, start:], states)
    clip_tokenizer = inputs.load_tokenizer(demo_13b, "tokenizer_2", "CLIPTokenizer")
    clip = load(demo_13b.folder / "text_encoder_2", "CLIPTextModel")
    pooled_ids = inputs.clip_ids(clip_tokenizer, PROMPTS)
    assert_close(run(clip, encoders.clip_pooled, pooled_ids), pooled)
