"""Small modules of diffusers with random weights, for what no video pipeline has.

    python -m tests.modules.small > table.md

The transformers and autoencoders of the examples are there too, with the arguments of
the first calls that upstream's pipeline makes. The command makes the table of modules:
how near the port comes, and the share of the parameters that lies in stacked blocks.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch.utils import _pytree as pytree

import tests.conftest  # noqa: F401  (the devices, before jax is imported)
import tpuport
from tests.pipelines.example import Example, all_examples, made, prepared, run, seeded
from tpuport.core.seam.blocks import alike_blocks, named_in
from tpuport.errors import TpuportError

Config = tuple[dict[str, Any], dict[str, Any]]
"""The keywords of a class, and of its forward."""

KINDS = ("transformers", "autoencoders")
ROPE: dict[str, Any] = {"attention_head_dim": 16, "num_attention_heads": 2}
TOKENS = {"hidden_states": seeded(1, 1, 12, 8), "timestep": torch.tensor([0.7])}
PIXELS = {"sample": seeded(1, 1, 3, 16, 16)}
SOUND = {"sample": seeded(1, 1, 2, 32)}


def ids(*shape: int) -> torch.Tensor:
    """Positions: the numbers from 0 on, along all dims."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape)


CONFIGS: dict[str, Callable[[], Config]] = {
    "AceStepTransformer1DModel": lambda: (
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 4,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "in_channels": 24,
            "audio_acoustic_hidden_dim": 8,
            "sliding_window": 2,
        },
        {
            **TOKENS,
            "timestep_r": torch.tensor([0.3]),
            "encoder_hidden_states": seeded(2, 1, 5, 16),
            "context_latents": seeded(3, 1, 12, 16),
        },
    ),
    "BriaFibo2Transformer2DModel": lambda: (
        {
            "in_channels": 2,
            "dim": 32,
            "n_layers": 13,
            "n_heads": 2,
            "cap_feat_dim": 8,
            "injection_layer_ids": (1, 3, 5, 7, 9, 11),
            "min_num_gist_tokens": 4,
            "max_num_gist_tokens": 8,
            "gist_step": 4,
            "gist_min_text_len": 4,
            "gist_max_text_len": 8,
            "axes_dims": (8, 4, 4),
            "axes_lens": (16, 16, 16),
        },
        {
            "hidden_states": seeded(1, 1, 2, 8, 8),
            "timestep": torch.tensor([0.7]),
            "encoder_hidden_states": seeded(2, 1, 7, 5, 8),
        },
    ),
    "HiDreamImageTransformer2DModel": lambda: (
        {
            **ROPE,
            "patch_size": 2,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 2,
            "num_single_layers": 2,
            "caption_channels": [8, 6],
            "text_emb_dim": 8,
            "num_routed_experts": 3,
            "num_activated_experts": 2,
            "axes_dims_rope": (8, 4, 4),
            "max_resolution": (16, 16),
            "llama_layers": (0, 0, 1, 1),
            "force_inference_output": True,
        },
        {
            "hidden_states": seeded(1, 1, 4, 16, 16),
            "timesteps": torch.tensor([700]),
            "encoder_hidden_states_t5": seeded(2, 1, 5, 8),
            "encoder_hidden_states_llama3": seeded(3, 2, 1, 5, 6),
            "pooled_embeds": seeded(4, 1, 8),
        },
    ),
    "OmniGenTransformer2DModel": lambda: (
        {
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_layers": 3,
            "pad_token_id": 0,
            "vocab_size": 40,
            "time_step_dim": 8,
            "rope_scaling": {"long_factor": [1, 1, 2, 2], "short_factor": [1, 1, 1, 1]},
        },
        {
            "hidden_states": seeded(1, 1, 4, 4, 4),
            "timestep": torch.tensor([0.7]),
            "input_ids": ids(1, 9),
            "input_img_latents": [seeded(2, 1, 4, 4, 4)],
            "input_image_sizes": {0: [[2, 6]]},
            "attention_mask": torch.ones(1, 14, 14),
            "position_ids": ids(1, 14),
        },
    ),
    "QwenImageTransformer2DModel": lambda: (
        {
            **ROPE,
            "in_channels": 8,
            "out_channels": 2,
            "num_layers": 2,
            "joint_attention_dim": 8,
            "axes_dims_rope": (8, 4, 4),
        },
        {
            **TOKENS,
            "encoder_hidden_states": seeded(2, 1, 5, 8),
            "encoder_hidden_states_mask": torch.tensor([[1, 1, 1, 0, 0]]),
            "img_shapes": [(1, 3, 4)],
        },
    ),
    "StableAudio3DiTModel": lambda: (
        {
            "io_channels": 8,
            "embed_dim": 16,
            "depth": 3,
            "num_heads": 2,
            "cond_token_dim": 8,
            "global_cond_dim": 6,
            "local_add_cond_dim": 5,
            "timestep_features_dim": 16,
            "ff_mult": 2,
            "num_memory_tokens": 3,
        },
        {
            "hidden_states": seeded(1, 1, 8, 12),
            "timestep": torch.tensor([0.7]),
            "encoder_hidden_states": seeded(2, 1, 5, 8),
            "global_hidden_states": seeded(3, 1, 6),
        },
    ),
    "ZImageTransformer2DModel": lambda: (
        {
            "in_channels": 4,
            "dim": 32,
            "n_layers": 3,
            "n_refiner_layers": 2,
            "n_heads": 2,
            "n_kv_heads": 2,
            "cap_feat_dim": 8,
            "axes_dims": [8, 4, 4],
            "axes_lens": [64, 16, 16],
        },
        {
            "x": [seeded(1, 4, 1, 8, 8)],
            "t": torch.tensor([0.7]),
            "cap_feats": [seeded(2, 5, 8)],
        },
    ),
    "AutoencoderDC": lambda: (
        {
            "latent_channels": 4,
            "attention_head_dim": 2,
            "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "decoder_block_types": ("ResBlock", "EfficientViTBlock"),
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "encoder_qkv_multiscales": ((), (5,)),
            "decoder_qkv_multiscales": ((), (5,)),
            "encoder_layers_per_block": (1, 1),
            "decoder_layers_per_block": (1, 1),
            "upsample_block_type": "interpolate",
        },
        PIXELS,
    ),
    "AutoencoderKLMiniMaxH3Audio": lambda: (
        {
            "encoder_dim": 4,
            "encoder_rates": (2, 2),
            "latent_dim": 16,
            "latent_channels": 4,
            "num_attention_heads": 2,
            "decoder_dim": 8,
            "decoder_rates": (2, 2),
            "decoder_kernel_sizes": (4, 4),
            "resblock_kernel_sizes": (3,),
            "resblock_dilation_sizes": ((1, 3),),
            "latents_mean": [0.0] * 4,
            "latents_std": [1.0] * 4,
        },
        {"sample": seeded(1, 1, 1, 32)},
    ),
    "AutoencoderOobleck": lambda: (
        {
            "encoder_hidden_size": 6,
            "decoder_channels": 6,
            "decoder_input_channels": 3,
            "downsampling_ratios": [2, 4],
            "channel_multiples": [1, 2],
        },
        SOUND,
    ),
    "AutoencoderTiny": lambda: (
        {
            "encoder_block_out_channels": (8, 8),
            "decoder_block_out_channels": (8, 8),
            "num_encoder_blocks": (1, 1),
            "num_decoder_blocks": (1, 1),
        },
        PIXELS,
    ),
    "Cosmos3AVAEAudioTokenizer": lambda: (
        {
            "sampling_rate": 16,
            "hop_size": 4,
            "input_channels": 1,
            "enc_dim": 4,
            "enc_num_blocks": 1,
            "enc_n_fft": 8,
            "enc_hop_length": 2,
            "enc_latent_dim": 8,
            "enc_c_mults": (1,),
            "enc_strides": (2,),
            "vocoder_input_dim": 4,
            "dec_dim": 4,
            "dec_c_mults": (1, 2),
            "dec_strides": (2, 2),
            "dec_out_channels": 2,
        },
        SOUND,
    ),
    "VQModel": lambda: (
        {"block_out_channels": (8,), "norm_num_groups": 4, "latent_channels": 2},
        PIXELS,
    ),
}
"""By class; a class that an example holds needs none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A call of one module's method.

    Attributes:
        module: upstream's.
        method: ``forward``, ``encode`` or ``decode``.
        args, kwargs: of the call.
    """

    module: torch.nn.Module
    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """The class, and the method if it is not ``forward``."""
        path = (type(self.module).__name__, self.method)
        return ".".join(path).removesuffix(".forward")

    def on(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The tensors that a module answers with."""
        torch.manual_seed(1)  # for modules that draw
        kwargs = {name: _again(value) for name, value in self.kwargs.items()}
        with torch.no_grad():
            return tensors_of(getattr(module, self.method)(*self.args, **kwargs))

    def difference(self, mesh: str) -> float:
        """The largest difference of the port, as a share of upstream's largest value.

        NaN and another shape count as infinite.
        """
        expected = self.on(self.module)
        found = self.on(tpuport.port(self.module, mesh=mesh, progress=False))
        if [x.shape for x in found] != [x.shape for x in expected]:
            return math.inf
        return largest(found, expected)

    def from_float64(self, found: list[torch.Tensor]) -> float:
        """The largest difference from upstream's result in float64, as a share."""
        module = copy.deepcopy(self.module).double()
        with torch.no_grad():
            exact = getattr(module, self.method)(
                *map(_doubled, self.args),
                **{name: _doubled(value) for name, value in self.kwargs.items()},
            )
        return largest(found, tensors_of(exact))


def _again(value: Any) -> Any:
    """The value; a generator begins anew with each call."""
    if isinstance(value, torch.Generator):
        return torch.Generator().manual_seed(value.initial_seed())
    return value


def _doubled(value: Any) -> Any:
    floats = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floats else value


def largest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, as a share of the largest value; NaN is infinite."""
    worst = max(
        float((f - e).abs().max() / e.abs().max())
        for f, e in zip(found, expected, strict=True)
        if e.numel()
    )
    return worst if worst == worst else math.inf


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in what a module gives back, such as an output or a distribution."""
    if isinstance(value, torch.Tensor):
        plain = torch.view_as_real(value) if value.is_complex() else value
        return [plain if plain.dtype == torch.float64 else plain.float()]
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    return [tensor for part in value for tensor in tensors_of(part)]


def configured(name: str) -> list[Call]:
    """The forward of a class in ``CONFIGS``; of an autoencoder its halves too."""
    config, inputs = CONFIGS[name]()
    torch.manual_seed(0)
    module = prepared(getattr(diffusers, name)(**config))
    calls = [Call(module=module, method="forward", kwargs=inputs)]
    if hasattr(module, "decode"):
        (sample,) = inputs.values()
        calls.append(Call(module=module, method="encode", args=(sample,), kwargs={}))
        with torch.no_grad():
            (latents, *_) = module.encode(sample, return_dict=False)
        if not isinstance(latents, torch.Tensor):
            latents = latents.mode()
        calls.append(Call(module=module, method="decode", args=(latents,), kwargs={}))
    return calls


def called(one: Example) -> list[Call]:
    """The first call of each module of an example, as upstream's pipeline makes it."""
    pipeline, call = made(one)
    found: dict[str, Call] = {}
    for component in pipeline.components.values():
        kind = type(component).__module__
        if not any(kind.startswith(f"diffusers.models.{k}") for k in KINDS):
            continue
        for method in ("forward", "encode", "decode"):
            if hasattr(component, method):
                vars(component)[method] = _noting(component, method, found)
    run(pipeline, call)
    for noted in found.values():
        for method in ("forward", "encode", "decode"):
            vars(noted.module).pop(method, None)
    return list(found.values())


def _noting(module: Any, method: str, found: dict[str, Call]) -> Callable[..., Any]:
    original = getattr(module, method)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        given = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        noted = Call(module=module, method=method, args=given[0], kwargs=given[1])
        found.setdefault(noted.name, noted)
        return original(*args, **kwargs)

    return noting


def share(name: str) -> float | None:
    """The part of a class's parameters in stacks; ``None`` without defaults.

    Children that no method of the class's file names are in no program, such as heads
    that a pipeline calls by themselves: they do not count.
    """
    try:
        with torch.device("meta"):
            module = getattr(diffusers, name)()
    except (TypeError, ValueError):
        return None
    held = 0
    for stack in alike_blocks(module):
        held += sum(p.numel() for block in stack.blocks for p in block.parameters())
    named = named_in(type(module).__module__)
    used = [child for name, child in module.named_children() if name in named]
    own = sum(parameter.numel() for parameter in module.parameters(recurse=False))
    return held / (own + sum(p.numel() for c in used for p in c.parameters()))


def _all_calls() -> Iterator[Call]:
    for name in CONFIGS:
        yield from configured(name)
    for one in all_examples().values():
        if not one.refused:
            yield from called(one)


def main() -> None:
    """Print the table."""
    known: set[str] = set()
    print("| module | largest difference | in stacks, by default |")
    print("| --- | --- | --- |")
    for call in _all_calls():
        if call.name in known:
            continue
        known.add(call.name)
        try:
            worst = call.difference("dp=1")
            told = f"{worst:.0e}" if worst < 1e-5 else f"**{worst:.0e}**"
        except TpuportError as error:
            told = f"no: {error}"
        part = share(type(call.module).__name__)
        stacks = "-" if part is None else f"{part:.0%}"
        print(f"| {call.name} | {told} | {stacks} |", flush=True)


if __name__ == "__main__":
    main()
