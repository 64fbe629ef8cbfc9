"""LoRAs with random factors, and weights with LoRAs fused into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.pipelines.example import all_examples, made
from tpuport.core.pipelines.loras import Lora, fuse
from tpuport.core.reports import Reporter
from tpuport.core.seam.ported import modules_of
from tpuport.core.spec.lora_choice import LoraChoice
from tpuport.targets import matched_loras

Tensors = dict[str, torch.Tensor]

#: Of each example, what LoRAs are made for: the ends of paths.
LAYERS = {
    "WanPipeline": ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2"),
    "CogVideoXPipeline": ("to_q", "to_v", "ff.net.2"),
    "AllegroPipeline": ("to_q", "to_out.0"),
    "HunyuanVideo15Pipeline": ("attn.to_q", "attn.to_k", "attn.to_v", "add_q_proj"),
    "HunyuanVideoPipeline": ("to_q", "to_k", "to_v", "proj_mlp", "add_q_proj", "net.2"),
    "AnimateDiffPipeline": ("to_q", "q_proj", "out_proj", "fc1"),
    "AnimateDiffSDXLPipeline": ("to_q", "q_proj", "out_proj", "fc1"),
}


def pipeline_of(name: str) -> Any:
    return made(all_examples()[name])[0]


def lora_for(
    pipeline: Any, component: str = "transformer", rank: int = 2, seed: int = 5
) -> Tensors:
    """Random factors for layers of a component; those of a block share an A."""
    ends = LAYERS[type(pipeline).__name__]
    torch.manual_seed(seed)
    found: Tensors = {}
    first: Tensors = {}
    for path, layer in getattr(pipeline, component).named_modules():
        if not path.endswith(ends):
            continue
        rows, columns = layer.weight.shape
        # The parts of a fused layer have one A in each block.
        shared = f"{path.split('.')[:2]} {columns}"
        factor = first.setdefault(shared, torch.randn(rank, columns) * 0.3)
        found[f"{path}.lora_A.weight"] = factor
        found[f"{path}.lora_B.weight"] = torch.randn(rows, rank) * 0.3
    assert found
    return found


def written(tensors: Tensors, file: Path, prefix: str = "") -> Path:
    whole = {f"{prefix}{key}": tensor.clone() for key, tensor in tensors.items()}
    save_file(whole, file)
    return file


def weights(pipeline: Any) -> Tensors:
    """Of all modules."""
    return {
        f"{name}.{key}": tensor.clone()
        for name, module in modules_of(pipeline).items()
        for key, tensor in module.state_dict().items()
    }


def shape_of(pipeline: Any) -> dict[str, Any]:
    """The class and the attributes of each part of each module."""
    return {
        f"{name}.{path}": (type(one), set(vars(one)))
        for name, module in modules_of(pipeline).items()
        for path, one in module.named_modules()
    }


def fused(name: str, text: str, heard: Reporter | None = None) -> Tensors:
    """The weights with a LoRA that tpuport fuses."""
    pipeline = pipeline_of(name)
    modules = modules_of(pipeline)
    found = [Lora.find(LoraChoice.parse(text), Reporter())]
    before = shape_of(pipeline)
    fuse(matched_loras(type(pipeline), modules, found, heard or Reporter()), modules)
    assert shape_of(pipeline) == before  # so programs are the ones without a LoRA
    return weights(pipeline)


def by_upstream(name: str, file: Path, scale: float) -> Tensors:
    pipeline = pipeline_of(name)
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(str(file))
        known = [n for n in pipeline._lora_loadable_modules if hasattr(pipeline, n)]
        pipeline.fuse_lora(components=known, lora_scale=scale)
        pipeline.unload_lora_weights()
    else:
        pipeline.transformer.load_lora_adapter(str(file))
        pipeline.transformer.fuse_lora(lora_scale=scale)
        pipeline.transformer.unload_lora()
    return weights(pipeline)


def apart(one: Tensors, other: Tensors) -> float:
    assert one.keys() == other.keys()
    return max(float((one[key] - other[key]).abs().max()) for key in one)
