"""A pipeline at a small size, by rule: few layers, two heads, thin channels.

What ties components together stays as it is: latent channels, head dims, the width of
text. A class of diffusers has the configs of a full size as its defaults.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_origin

import diffusers
import torch

from tpuport.core.enums import denoises
from tpuport.core.pipelines.stand_in import class_of, tokenizer
from tpuport.core.weights.absent_packages import needs_of
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import UsageError, did_you_mean

Configs = dict[str, Any]
"""``model_index``, and the config of each component that has one."""

_FILES = ("config.json", "scheduler_config.json", "preprocessor_config.json")
#: Of a denoiser: what its text encoder gives, and what a pooled one gives.
_TEXT = (
    *("text_dim", "text_embed_dim", "caption_channels", "joint_attention_dim"),
    "cross_attention_dim",
)
_POOLED = ("pooled_projection_dim",)
#: Settings of text encoders, whatever the size.
_ENCODER = {
    **dict.fromkeys(("num_layers", "num_decoder_layers", "num_hidden_layers"), 2),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("d_kv", "head_dim"), 16),
    **dict.fromkeys(("d_ff", "intermediate_size"), 64),
}
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
#: Layers of what is named ``..._layers``, and layers of a text encoder that are read.
_MOST_LAYERS = 2
_READ = ("num_text_layers", "num_condition_layers")
_BLOCKS = ("layers_per_block", "num_res_blocks")
_HIDDEN = ("ffn_dim", "intermediate_size")
#: The denoiser has a weight for each place of a video of one size, which is made small.
LEARNED = "use_learned_positional_embeddings"
_LEARNED_SIZE = {"sample_height": 8, "sample_width": 8, "sample_frames": 9}
#: Channels are a multiple of the groups that upstream's norms have.
_GROUPS = 32


def of_class(name: str) -> Configs:
    """The configs of a pipeline class, whose components have their classes' defaults.

    Text encoders are small: their classes do not say which one a pipeline is for.

    Raises:
        UsageError: there is no such class, it is no pipeline, or its components cannot
            be made without configs.
    """
    cls = pipeline_class(name)
    index: dict[str, Any] = {"_class_name": name}
    configs: Configs = {"model_index": index}
    needed: dict[str, Any] = {}
    denoiser = ""
    for part, found in cls._get_signature_types().items():
        kinds = [t for t in found if isinstance(t, type) and t is not type(None)]
        kind = next((t for t in kinds if get_origin(t) is None), None)
        if kind in (None, bool, float, int, str):  # a setting, such as dict[int, str]
            continue
        if issubclass(kind, Enum):  # names many schedulers, the plainest first
            kind = getattr(diffusers, next(iter(kind)).name)
        if denoises(part) and not denoiser:
            denoiser = part
        elif part in cls._optional_components:
            index[part] = [None, None]
            continue
        needed[part] = kind
        library = kind.__module__.partition(".")[0]
        known = library in ("diffusers", "transformers")
        made = issubclass(kind, torch.nn.Module) or any(
            word in kind.__name__ for word in ("Tokenizer", "Scheduler")
        )
        if not known or not made or "pipelines" in kind.__module__.split("."):
            raise _refused(name, f"{part} is a {kind.__name__}")
        index[part] = [library, kind.__name__]
        if issubclass(kind, torch.nn.Module) and library == "diffusers":
            configs[part] = _defaults(name, part, kind)
    wide = configs.get(denoiser, {})
    latents = wide.get("in_channels")
    if needed.get("vae") is diffusers.AutoencoderKL and isinstance(latents, int):
        configs["vae"]["latent_channels"] = latents  # of several image models
    for part, kind in needed.items():
        is_module = issubclass(kind, torch.nn.Module)
        if is_module and index[part][0] == "transformers":
            words = _tokenizer_for(part, kind, index)
            configs[part] = _encoder(name, part, kind, wide, words)
    return configs


def pipeline_class(name: str) -> Any:
    """A pipeline class of diffusers.

    Raises:
        UsageError: there is none of that name, or it is no pipeline.
    """
    found, base = getattr(diffusers, name, None), diffusers.DiffusionPipeline
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        return found
    known = [one for one in dir(diffusers) if one.endswith("Pipeline")]
    hint = did_you_mean(name, known, "name a class such as WanPipeline")
    if found is None:
        raise UsageError(f"diffusers {diffusers.__version__} has no {name}; {hint}")
    if isinstance(found, type) and (missing := needs_of(found)):
        raise UsageError(
            f"{name} needs a package that is not installed: pip install "
            + " ".join(missing)
        )
    raise UsageError(f"{name} is no pipeline of diffusers; {hint}")


def _defaults(pipeline: str, part: str, kind: type) -> Configs:
    found = {}
    for name, one in inspect.signature(kind.__init__).parameters.items():  # type: ignore[misc]
        if name == "self" or one.kind in (one.VAR_KEYWORD, one.VAR_POSITIONAL):
            continue
        if one.default is one.empty:
            raise _refused(pipeline, f"{kind.__name__} of {part} has no default {name}")
        found[name] = list(one.default) if type(one.default) is tuple else one.default
    return found


def _refused(pipeline: str, why: str) -> UsageError:
    return UsageError(
        f"{pipeline} cannot be made from its name alone: {why}; add --weights FOLDER "
        "with a pipeline of the class, whose configs are made small, or a small one"
    )


def _tokenizer_for(part: str, kind: Any, index: Configs) -> Any:
    """The tokenizer of a text encoder; the index gets its class."""
    own = part.replace("text_encoder", "tokenizer")
    if own == part or own not in index:
        return None
    if index[own][1] != "AutoTokenizer":
        return tokenizer(index[own][1])
    family = kind.__name__.removesuffix("EncoderModel").removesuffix("Model")
    made = tokenizer(f"{family}Tokenizer")
    index[own][1] = type(made).__name__
    return made


def _encoder(
    pipeline: str, part: str, kind: Any, denoiser: Mapping[str, Any], words: Any
) -> Configs:
    """The config of a small text encoder that gives what a denoiser takes."""
    pooled = "CLIP" in kind.__name__ and any(denoiser.get(n) for n in _POOLED)
    names = _POOLED if pooled else _TEXT
    width = next((denoiser[n] for n in names if isinstance(denoiser.get(n), int)), None)
    if width is None or words is None:
        raise _refused(pipeline, f"nothing says how wide {part} is")
    known = kind.config_class().to_dict()
    wide = dict.fromkeys(("d_model", "hidden_size", "projection_dim"), width)
    given = {**wide, **_ENCODER, "feed_forward_proj": "gated-gelu"}  # of T5 1.1
    return _small_encoder({k: v for k, v in given.items() if k in known}, words)


def _small_encoder(config: Mapping[str, Any], words: Any) -> Configs:
    own: dict[str, Any] = {**_ENCODER}
    if words is not None:
        own["vocab_size"] = len(words)
        own |= {name: getattr(words, name, None) for name in _IDS}
    kept = {*config, *_IDS, "vocab_size"}
    found = {**config, **{k: v for k, v in own.items() if k in kept}}
    for name, inner in found.items():
        if isinstance(inner, dict) and "hidden_size" in inner:
            found[name] = _small_encoder(inner, words)
    return found


def of_folder(folder: Path) -> Configs:
    """The configs of a pipeline's folder; tokenizers have none.

    Raises:
        WeightsError: a file is no JSON object.
    """
    checkpoint = Checkpoint(folder, str(folder))
    configs: Configs = {"model_index": dict(checkpoint.index)}
    for part, entry in checkpoint.index.items():
        if isinstance(entry, list) and None not in entry and len(entry) == 2:
            for file in _FILES:
                if (folder / part / file).is_file():
                    text = (folder / part / file).read_text("utf-8")
                    configs[part] = json.loads(text)
    return configs


def small(configs: Mapping[str, Any]) -> Configs:
    """The configs of the same pipeline with few layers, heads and channels."""
    index = dict(configs["model_index"])
    made: Configs = {"model_index": index}
    for part, config in configs.items():
        if part == "model_index":
            continue
        library, name = index[part]
        kind = class_of(library, name)
        if not issubclass(kind, torch.nn.Module):
            made[part] = dict(config)
        elif library == "transformers":
            words = _tokenizer_for(part, kind, index)
            made[part] = _small_encoder(config, words)
        else:
            made[part] = _small_module(config)
    return made


def _small_module(config: Mapping[str, Any]) -> Configs:
    found = {name: _small_value(name, value) for name, value in config.items()}
    if config.get(LEARNED):
        found |= _LEARNED_SIZE
    heads, dim = config.get("num_attention_heads"), config.get("attention_head_dim")
    if isinstance(heads, int) and isinstance(dim, int):
        # What is as wide as all heads together stays so.
        inner = found["num_attention_heads"] * dim
        found |= {k: inner for k, v in config.items() if v == heads * dim}
    return found


def _small_value(name: str, value: Any) -> Any:
    layers = name.endswith("_layers") and name not in _READ
    if isinstance(value, list | tuple):
        if layers and not name.startswith("num_"):  # numbers of layers
            return [one for one in value if one < _MOST_LAYERS]
        return [_small_value(name, one) for one in value]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if layers:
        return min(value, _MOST_LAYERS)
    if name.endswith("num_attention_heads"):
        return min(value, 2)
    if name.endswith(_BLOCKS):
        return 1
    if name in _HIDDEN:
        return min(value, 64)
    if name.endswith(("block_out_channels", "base_dim")):
        return max(_GROUPS, value // 4 // _GROUPS * _GROUPS)
    return value


def as_text(configs: Mapping[str, Any]) -> str:
    """JSON with a line for each setting."""
    parts = []
    for part, config in configs.items():
        lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in config.items()]
        parts.append(f"{json.dumps(part)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def without_cleaning() -> None:
    """Let upstream leave prompts as they are, where ``ftfy`` is not installed.

    Many pipelines clean prompts with that package; those of tpuport are clean.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusers.") and hasattr(module, "basic_clean"):
            vars(module).setdefault("ftfy", SimpleNamespace(fix_text=str))
