"""A pipeline at a small size, by rule: few layers, two heads, thin channels.

What ties components together stays as it is: latent channels, head dims, the width of
text. A class of diffusers has the configs of a full size as its defaults.
"""

from __future__ import annotations

import inspect
import json
import pkgutil
import re
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_origin

import diffusers
import torch
import transformers

from tpuport.core.enums import denoises
from tpuport.core.files.atomic import one_line
from tpuport.core.pipelines.folder import library_named
from tpuport.core.pipelines.stand_in import class_of, tokenizer
from tpuport.core.spec import outside
from tpuport.core.weights.absent_packages import needs_of
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.errors import PluginError, UsageError, did_you_mean

Configs = dict[str, Any]
"""``model_index``, and the config of each component that has one."""

#: What needs no config.
_PLAINLY = re.compile("Tokenizer|Scheduler")
_FILES = ("config.json", "scheduler_config.json", "preprocessor_config.json")
#: Of a denoiser: what its text encoder gives, what a pooled one, and one of pictures.
_TEXT = (
    *("text_dim", "text_embed_dim", "caption_channels", "joint_attention_dim"),
    *("in_text_dim", "cross_attention_dim"),
)
_POOLED = ("pooled_projection_dim",)
_PICTURE = ("image_dim", "image_embed_dim", "image_proj_dim")
#: Of a denoiser: channels of what it takes and gives; of an autoencoder, of latents.
_IN, _OUT = ("in_channels", "in_visual_dim"), ("out_channels", "out_visual_dim")
_LATENTS = ("latent_channels", "z_dim")
#: What a signature names, and is not what a pipeline is made with: a plain class.
_PLAIN = {
    "BaseGuidance": "ClassifierFreeGuidance",
    "SchedulerMixin": "FlowMatchEulerDiscreteScheduler",
    "Gemma2PreTrainedModel": "Gemma2Model",
    "CLIPProcessor": "CLIPImageProcessor",
    **dict.fromkeys(("Qwen2VLProcessor", "Qwen2_5_VLProcessor"), "Qwen2Tokenizer"),
}
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
#: States of a text encoder that are read together: of each layer, and those before.
_STATES = "text_proj_in_factor"
#: What vision parts of text encoders have in place of the settings above.
_SEES = {"depth": 2, "fullatt_block_indexes": [1], "hidden_size": 64}
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

    Encoders are small: their classes do not say which one a pipeline is for.

    Raises:
        UsageError: there is no such class, it is no pipeline, or its components cannot
            be made without configs.
    """
    cls = pipeline_class(name)
    entry = outside.entry_of(name) if ":" in name else name
    index: dict[str, Any] = {"_class_name": entry}
    configs: Configs = {"model_index": index}
    found = {part: _choices(*kinds) for part, kinds in _signature(cls).items()}
    found = {part: kinds for part, kinds in found.items() if kinds}
    denoiser = next(filter(denoises, found), "")
    wide = _defaults(name, denoiser, found[denoiser][0]) if denoiser else {}
    needed: dict[str, Any] = {}
    for part, kinds in found.items():
        if part != denoiser and part in cls._optional_components:
            index[part] = [None, None]
            continue
        needed[part] = kind = _fitting(name, part, kinds, wide)
        place, own = kind.__module__.split("."), outside.module_named(kind.__module__)
        library = place[2] if "pipelines" in place else place[0]
        index[part] = [
            kind.__module__ if own else library,
            kind.__name__.removesuffix("Pil"),
        ]
        module = issubclass(kind, torch.nn.Module)
        if not hasattr(library_named(index[part][0]), index[part][1]):
            raise _refused(name, f"{part} is a {kind.__name__}")
        if part == denoiser:
            configs[part] = wide
        elif module and hasattr(kind, "from_config"):
            configs[part] = _defaults(name, part, kind)
        elif kind.__name__.endswith(("ImageProcessor", "ImageProcessorPil")):
            configs[part] = json.loads(kind().to_json_string())
        elif issubclass(kind, diffusers.guiders.BaseGuidance):
            configs[part] = dict(kind().config)
        elif not module and not _PLAINLY.search(kind.__name__):
            raise _refused(name, f"{part} is a {kind.__name__}")
    _tie_channels(wide, configs.get("vae", {}), needed.get("vae"))
    for config in configs.values():
        if _STATES in config:
            config[_STATES] = _MOST_LAYERS + 1
        shared = {"cross_attention_dim"} & config.keys() & wide.keys()
        config |= {key: wide[key] for key in shared}  # of a control net
    for part, kind in needed.items():
        if issubclass(kind, torch.nn.Module) and index[part][0] == "transformers":
            try:
                words = _tokenizer_for(part, kind, index)
            except PluginError as error:
                raise _refused(name, str(error).partition(";")[0]) from None
            configs[part] = _encoder(name, part, kind, wide, words)
    return configs


def _signature(cls: Any) -> dict[str, list[type]]:
    """The classes of each component, a setting's left out."""
    return {
        part: [t for t in found if isinstance(t, type) and get_origin(t) is None]
        for part, found in cls._get_signature_types().items()
    }


def _choices(*kinds: Any) -> list[Any]:
    """The classes that a component may have; none of a setting, such as a number."""
    found = []
    for kind in kinds:
        if issubclass(kind, Enum):  # names many schedulers, the plainest first
            kind = getattr(diffusers, next(iter(kind)).name)
        name = _PLAIN.get(kind.__name__)
        if name is not None:
            kind = getattr(diffusers, name, None) or getattr(transformers, name)
        if kind not in (type(None), bool, float, int, str, list, tuple):
            found.append(kind)
    return found


def _fitting(
    pipeline: str, part: str, kinds: list[Any], wide: Mapping[str, Any]
) -> Any:
    """The class of a component; of several, one whose latents a denoiser takes."""
    kind = kinds[0]
    if kind is inspect.Parameter.empty and part == "scheduler":
        return diffusers.FlowMatchEulerDiscreteScheduler
    library = outside.package_of(kind.__module__)
    known = library in ("diffusers", "transformers")
    if not (known or outside.module_named(kind.__module__)):
        raise _refused(pipeline, f"{part} is a {kind.__name__}")
    if len(kinds) == 1 or not part.endswith("vae"):
        return kind
    taken = _first(wide, _IN)
    fit = (k for k in kinds if _first(_defaults(pipeline, part, k), _LATENTS) == taken)
    return next(fit, kind)


def _first(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of some settings that is a number."""
    found = (config.get(name) for name in names)
    return next((one for one in found if type(one) is int), None)


def _tie_channels(wide: Configs, vae: Configs, kind: Any) -> None:
    """Give a denoiser and an autoencoder equal channels where no default ties them."""
    taken, latents = _first(wide, _IN), _first(vae, _LATENTS)
    if kind is diffusers.AutoencoderKL and taken is not None:
        vae["latent_channels"] = latents = taken  # of several image models
    if wide.get("patch_size", 1) is None:
        wide["patch_size"] = 2
    if latents is None or taken != _first(wide, _OUT):
        return
    wide |= {name: latents for name in (*_IN, *_OUT) if name in wide}


def with_more_channels(configs: Mapping[str, Any]) -> Iterator[Configs]:
    """The configs with a denoiser that takes more than a latent.

    Of a picture or a video that a pipeline begins with, channels are joined to those
    of noise: latents, their mask, or both. No class says which.
    """
    part = next(filter(denoises, configs), "")
    latents = _first(configs.get("vae", {}), _LATENTS)
    config = configs.get(part, {})
    if latents is None or _first(config, _IN) != latents:
        return
    for count in (2 * latents + 4, 2 * latents, 2 * latents + 1, latents + 1):
        more = {name: count for name in _IN if name in config}
        yield {**configs, part: {**config, **more}}


def pipeline_class(name: str) -> Any:
    """A pipeline class of diffusers, or ``"package.module:Class"`` of another package.

    Raises:
        UsageError: there is none of that name, or it is no pipeline.
    """
    found, base = getattr(diffusers, name, None), diffusers.DiffusionPipeline
    if ":" in name:
        try:
            found = pkgutil.resolve_name(name)
        except Exception as error:  # whatever the import of a foreign package raises
            raise UsageError(
                f"{name} cannot be imported: {type(error).__name__}: "
                f"{one_line(error)}; install the package that has the class"
            ) from error
    if isinstance(found, type) and issubclass(found, base) and found is not base:
        if ":" in name:
            outside.named(name)
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
    pipeline: str, part: str, kind: Any, denoiser: Configs, words: Any
) -> Configs:
    """The config of a small encoder that gives what a denoiser takes."""
    known = kind.config_class().to_dict()
    if words is None and "image_size" in known:
        return _picture_encoder(known, denoiser)
    number = part.rpartition("_")[2]
    own = [n for n in denoiser if "text" in n and number.isdecimal() and number in n]
    pooled = "CLIP" in kind.__name__ and any(denoiser.get(n) for n in _POOLED)
    width = _first(denoiser, _POOLED if pooled else (*own, *_TEXT))
    if width is None or words is None:
        raise _refused(pipeline, f"nothing says how wide {part} is")
    wide = dict.fromkeys(("d_model", "hidden_size", "projection_dim"), width)
    given = {**wide, **_ENCODER, "feed_forward_proj": "gated-gelu"}  # of T5 1.1
    if "text_config" not in known:
        return _small_encoder({k: v for k, v in given.items() if k in known}, words)
    seen = {**_ENCODER, **_SEES, "out_hidden_size": width}
    if "embed_dim" in known["vision_config"]:
        seen |= {"embed_dim": _SEES["hidden_size"], "hidden_size": width}
    parts = {"text_config": given, "vision_config": seen}
    named: Configs = {
        name: {k: v for k, v in one.items() if k in known[name]}
        | {"model_type": known[name]["model_type"]}
        for name, one in parts.items()
    }
    return _small_encoder(named, words)


def _picture_encoder(known: Mapping[str, Any], denoiser: Configs) -> Configs:
    """The config of a small encoder of pictures; the denoiser takes what it gives."""
    width = _first(denoiser, _PICTURE) or known["hidden_size"]
    denoiser |= {n: width for n in _PICTURE if n in denoiser and denoiser[n] is None}
    projected = _first(denoiser, ("cross_attention_dim",)) or width
    wide = {"hidden_size": width, "projection_dim": projected}
    return {k: v for k, v in {**wide, **_ENCODER}.items() if k in known}


def _small_encoder(config: Mapping[str, Any], words: Any) -> Configs:
    own: dict[str, Any] = {**_ENCODER}
    if words is not None:
        own["vocab_size"] = len(words)
        own |= {name: getattr(words, name, None) for name in _IDS}
    kept = {*config, *_IDS, "vocab_size"}
    found = {**config, **{k: v for k, v in own.items() if k in kept}}
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"][:_MOST_LAYERS]
    heads = found.get("num_attention_heads")
    if heads and words is not None and type(words).__name__.startswith("Qwen"):
        half = found.get("head_dim", found["hidden_size"] // heads) // 2
        parts = [half - 2 * (half // 3), half // 3, half // 3]  # of time, rows, columns
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": parts}
        found["rope_parameters"] = {**rope, **found.get("rope_parameters", {})}
        found["rope_parameters"]["mrope_section"] = parts
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
    texts = {config.get(name) for name in _TEXT}
    for name in config:
        dim = config.get(name.replace("num_attention_heads", "attention_head_dim"))
        if name.endswith("_num_attention_heads") and config[name] * (dim or 0) in texts:
            found[name] = config[name]  # as wide as a text encoder
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
