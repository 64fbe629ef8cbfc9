"""Keys of LoRAs, brought to the names of a pipeline's modules.

Upstream's loader of the pipeline's class does so, with its converters. Of a class
without a loader, and of spellings that upstream's does not know, the keys are brought
to these names here.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from diffusers import ModelMixin
from diffusers.loaders import StableDiffusionXLLoraLoaderMixin
from diffusers.utils import (
    convert_state_dict_to_diffusers,
    convert_state_dict_to_peft,
    convert_unet_state_dict_to_peft,
    logging,
)

from tpuport.core.enums import denoises
from tpuport.errors import UsageError

Modules = Mapping[str, torch.nn.Module]
"""The torch modules of a pipeline, by component."""

Names = Mapping[str, Sequence[str]]
"""Original path of a layer, with ``{}`` for the number of a block -> the paths of
diffusers; the layer's outputs are those of these layers, one after the other."""

#: What peft's ``save_pretrained`` puts before a layer's path.
PEFT_PREFIX = "base_model.model."
#: What trainers put before a layer's path.
_PREFIX = re.compile(
    r"(model\.diffusion_model\.|diffusion_model\.|lora_unet_|lora_transformer_)"
)
#: The name of an adapter, which peft leaves out where it saves.
_DEFAULT = re.compile(r"(?<=\.lora_[AB])\.default(?=\.(weight|bias)$)")
#: Endings of keys -> what the tensor is.
_ENDINGS = {
    ".lora_A.weight": "lora_A.weight",
    ".lora_B.weight": "lora_B.weight",
    **dict.fromkeys((".lora_down.weight", ".lora.down.weight"), "lora_A.weight"),
    **dict.fromkeys((".lora_up.weight", ".lora.up.weight"), "lora_B.weight"),
    **dict.fromkeys((".lora_B.bias", ".diff_b"), "lora_B.bias"),
    ".alpha": "alpha",
}
#: Ways of peft to begin with that change the weights beside the LoRA.
_CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq")


class Part(NamedTuple):
    """What a LoRA has for one component, as upstream's loaders take it.

    Keys and settings begin with the component's name.
    """

    state: dict[str, torch.Tensor]
    alphas: dict[str, float] | None = None
    metadata: dict[str, Any] | None = None


@dataclass
class Matched:
    """Parts by component, and what is wrong with the keys of the file.

    Attributes:
        parts: what is fused into which component.
        unknown: keys of the file that fit no weight.
        shapes: in words, shapes that do not fit.
        left_out: keys that upstream's loader leaves out.
    """

    parts: dict[str, Part] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether each key has a weight that fits."""
        return bool(self.parts) and not self.unknown and not self.shapes


def takers(kind: Any, modules: Modules) -> dict[str, torch.nn.Module]:
    """The modules whose weights a LoRA may change.

    Those that upstream's loader of the pipeline's class knows, some text encoders among
    them, and all denoisers.
    """
    listed = getattr(kind, "_lora_loadable_modules", ())
    return {
        name: module
        for name, module in modules.items()
        if name in listed or (isinstance(module, ModelMixin) and denoises(name))
    }


def scaled(
    stored: Mapping[str, torch.Tensor], settings: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """A LoRA of peft's own format, with alpha in the first products.

    Args:
        settings: of ``adapter_config.json``.

    Raises:
        UsageError: of another kind of adapter, or one that changes weights beside.
    """
    from peft.utils.other import get_pattern_key

    kind, begun = settings.get("peft_type"), settings.get("init_lora_weights")
    if kind != "LORA":
        raise UsageError(f"adapter_config.json: peft_type is {kind!r}, and no LORA")
    if str(begun).startswith(_CHANGES_WEIGHTS):
        raise UsageError(
            f"adapter_config.json: init_lora_weights {begun!r} changes the weights "
            "beside the LoRA; save with peft's path_initial_model_for_weight_conversion"
        )
    patterns: Mapping[str, float] = settings.get("alpha_pattern") or {}
    found = dict(stored)
    for key, tensor in stored.items():
        if ".lora_A." not in key:
            continue
        path = key.removeprefix(PEFT_PREFIX).partition(".lora_A.")[0]
        alpha = patterns.get(
            get_pattern_key([*patterns], path), settings.get("lora_alpha", 8)
        )
        rank = len(tensor)
        scale = alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
        # A second product may have a bias, which the alpha of the first one misses.
        for name in (
            key,
            key.replace(".lora_A.", ".lora_B.")[: -len("weight")] + "bias",
        ):
            if name in stored and scale != 1:
                found[name] = stored[name].float() * scale
    return found


def matching(
    stored: Mapping[str, torch.Tensor],
    kind: Any,
    modules: Modules,
    component: str,
    names: Names,
    metadata: dict[str, Any] | None,
) -> Matched:
    """The parts of a LoRA, in whichever spelling fits.

    Args:
        stored: the tensors of the file.
        kind: the pipeline's class.
        modules: that take a LoRA; no weight is read.
        component: whose weights the LoRA is for; empty for what the keys name.
        names: that the model's original code has for its layers.
        metadata: settings in the file's header.
    """
    traced = {key: _traced(key, tensor) for key, tensor in stored.items()}
    bare = {_bare(key): tensor for key, tensor in traced.items()}
    named = component or next(filter(denoises, modules), next(iter(modules)))
    spellings = [traced]
    if len(bare) == len(traced):
        for prefix in (f"{named}.", "diffusion_model."):
            spellings.append({f"{prefix}{key}": one for key, one in bare.items()})
    found: Matched | None = None
    for spelt in spellings:
        tried = []
        if hasattr(kind, "lora_state_dict"):
            tried.append(_by_upstream(spelt, kind, modules, component, metadata))
        if spelt is traced:
            tried.append(_by_name(bare, modules, named, component, names, metadata))
        for one in tried:
            one.unknown = list(dict.fromkeys(one.unknown))
            if one.good:
                return one
            if found is None or len(one.unknown) < len(found.unknown):
                found = one
    assert found is not None
    return found


def _bare(key: str) -> str:
    return _DEFAULT.sub("", key.removeprefix(PEFT_PREFIX))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings of upstream's loaders: what they warn of is refused here."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


class _Traced(torch.Tensor):
    """A tensor that knows which keys of the file it was made from."""

    keys: frozenset[str] = frozenset()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = super().__torch_function__(function, types, args, kwargs or {})
        given = torch.utils._pytree.tree_leaves((args, kwargs or {}))
        keys = frozenset().union(*(t.keys for t in given if isinstance(t, cls)))
        for one in torch.utils._pytree.tree_leaves(made):
            if isinstance(one, cls):
                one.keys = keys | one.keys
        return made


def _traced(key: str, tensor: torch.Tensor) -> _Traced:
    made = tensor.as_subclass(_Traced)
    made.keys = frozenset([key])
    return made


def _part(
    named: str,
    state: Mapping[str, torch.Tensor],
    alphas: dict[str, float] | None,
    metadata: dict[str, Any] | None,
) -> Part:
    plain = {f"{named}.{k}": t.as_subclass(torch.Tensor) for k, t in state.items()}
    known = any(key.startswith(f"{named}.") for key in metadata or ())
    return Part(plain, alphas, metadata if known else None)


# --- by upstream's loader


def _by_upstream(
    stored: Mapping[str, _Traced],
    kind: Any,
    modules: Modules,
    component: str,
    metadata: dict[str, Any] | None,
) -> Matched:
    """The parts that upstream's loader makes of a file."""
    every = [key for tensor in stored.values() for key in tensor.keys]
    how: dict[str, Any] = {}
    if "unet" in modules and issubclass(kind, StableDiffusionXLLoraLoaderMixin):
        how["unet_config"] = modules["unet"].config  # as its load_lora_weights does
    try:
        with quiet():
            state, *more = kind.lora_state_dict(
                dict(stored), return_lora_metadata=True, **how
            )
    except Exception:  # of a spelling that it does not know, whatever it raises
        return Matched(unknown=every)
    alphas = more[0] if len(more) > 1 else None
    used = frozenset[str]().union(
        *(getattr(tensor, "keys", ()) for tensor in state.values())
    )
    found = Matched()
    for key in every:
        if key in used or key.endswith(".alpha"):
            continue
        left_out = key.endswith((".diff", ".diff_b"))
        (found.left_out if left_out else found.unknown).append(key)
    found.left_out.sort()
    by_component: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        named, _, rest = key.partition(".")
        by_component.setdefault(named, {})[rest] = tensor
    if component and len(by_component) == 1:
        (only,) = by_component
        by_component = {component: by_component[only]}
        metadata = _renamed(metadata, only, component)
        alphas = _renamed(alphas, only, component)
    for named, own in by_component.items():
        if named not in modules:
            found.unknown += [_key_of(named, *item) for item in own.items()]
            continue
        try:
            own = _as_peft(modules[named], own)
        except ValueError:
            found.unknown += [_key_of(named, *item) for item in own.items()]
            continue
        _fit(named, modules[named], own, found)
        found.parts[named] = _part(named, own, alphas, metadata)
    return found


def _as_peft(
    module: torch.nn.Module, own: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Keys as peft has them: what upstream's loaders do before they load.

    Raises:
        ValueError: upstream knows no such keys.
    """
    if isinstance(module, ModelMixin):
        if any("lora_A" in key or ".lokr_" in key for key in own):
            return own
        made: dict[str, torch.Tensor] = convert_unet_state_dict_to_peft(own)
        return made
    own = convert_state_dict_to_peft(convert_state_dict_to_diffusers(own))
    if hasattr(module, "text_model"):
        return own
    return {key.removeprefix("text_model."): tensor for key, tensor in own.items()}


def _renamed(
    values: Mapping[str, Any] | None, before: str, after: str
) -> dict[str, Any] | None:
    if values is None:
        return None
    return {
        f"{after}.{key.removeprefix(before + '.')}": one for key, one in values.items()
    }


def _layer(key: str) -> str:
    """The path of the layer that a key of peft is for."""
    return re.split(r"\.lora_|\.lokr_", key)[0]


def layers_of(named: str, part: Part) -> set[str]:
    """The paths of the layers of a component that a LoRA changes."""
    return {_layer(key.removeprefix(f"{named}.")) for key in part.state}


def _key_of(component: str, key: str, tensor: torch.Tensor) -> str:
    """What the file calls a tensor."""
    keys = sorted(tensor.keys) if isinstance(tensor, _Traced) else []
    return " + ".join(keys) or f"{component}.{key}"


def _fit(
    component: str,
    module: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    found: Matched,
) -> None:
    """Note the keys that fit no layer, and the shapes that do not fit theirs."""
    layers = dict(module.named_modules())
    for key, tensor in state.items():
        path, own = _layer(key), _key_of(component, key, tensor)
        weight = getattr(layers.get(path), "weight", None)
        if path == key or not isinstance(weight, torch.Tensor):
            found.unknown.append(own)
            continue
        other = {"lora_A": "lora_B", "lora_B": "lora_A"}
        for one, second in other.items():
            needed = f"{path}.{second}.weight"
            if key == f"{path}.{one}.weight" and needed not in state:
                found.unknown.append(f"{own} without {needed}")
        wanted = None
        if key.endswith(".lora_A.weight") and not isinstance(
            layers[path], torch.nn.Embedding
        ):
            wanted = (tensor.shape[0], *weight.shape[1:])
        elif key.endswith(".lora_B.weight"):
            wanted = (weight.shape[0], *tensor.shape[1:])
        elif key.endswith(".lora_B.bias"):
            wanted = (weight.shape[0],)
        if wanted is not None and tuple(tensor.shape) != tuple(wanted):
            found.shapes.append(
                f"{own} is {_by(tensor.shape)}, and {_by(wanted)} is needed"
            )


# --- by the names of the modules


def _by_name(
    stored: Mapping[str, _Traced],
    modules: Modules,
    first: str,
    component: str,
    names: Names,
    metadata: dict[str, Any] | None,
) -> Matched:
    """The parts of a file whose layers are called as modules are, or their originals.

    Dots in a path may be underscores, as kohya's trainers write them.
    """
    found = Matched()
    layers: dict[tuple[str, tuple[str, ...]], dict[str, torch.Tensor]] = {}
    known = {name: _spellings(module, names) for name, module in modules.items()}
    for key, tensor in stored.items():
        ending = next((e for e in _ENDINGS if key.endswith(e)), None)
        path = key.removesuffix(ending or "")
        own = path.partition(".")[0]
        named = own if own in modules else first
        path = _PREFIX.sub(
            "", path.removeprefix(f"{own}." if own in modules else ""), 1
        )
        named = component or named
        targets = known[named].get(path.replace(".", "_"))
        if ending is None or targets is None:
            found.unknown.append(_key_of("", key, tensor))
            continue
        layers.setdefault((named, targets), {})[_ENDINGS[ending]] = tensor
    has_alpha = any("alpha" in own for own in layers.values())
    states: dict[str, dict[str, torch.Tensor]] = {}
    for (named, targets), tensors in layers.items():
        made = _split(tensors, targets, dict(modules[named].named_modules()))
        states.setdefault(named, {}).update(made)
    for named, state in states.items():
        _fit(named, modules[named], state, found)
        settings = None if has_alpha else metadata
        found.parts[named] = _part(named, state, None, settings)
    return found


def _spellings(module: torch.nn.Module, names: Names) -> dict[str, tuple[str, ...]]:
    """The layers that a path without dots stands for."""
    paths = {path for path, one in module.named_modules() if hasattr(one, "weight")}
    blocks = {part for path in paths for part in path.split(".") if part.isdecimal()}
    found: dict[str, tuple[str, ...]] = {}
    for original, layers in names.items():
        for number in sorted(blocks) if "{}" in original else [""]:
            targets = tuple(layer.replace("{}", number) for layer in layers)
            if paths.issuperset(targets):
                spelt = original.replace("{}", number).replace(".", "_")
                found[spelt] = targets
    return {**found, **{path.replace(".", "_"): (path,) for path in paths}}


def _split(
    own: Mapping[str, torch.Tensor], targets: Sequence[str], layers: Modules
) -> dict[str, torch.Tensor]:
    """The tensors of a layer, for each of the layers that it stands for; alpha is in
    the first product."""
    made: dict[str, torch.Tensor] = {}
    sizes = [len(layers[target].get_parameter("weight")) for target in targets]
    for what, tensor in own.items():
        if what == "alpha":
            continue
        tensor = tensor.float()
        parts = [tensor] * len(targets)
        if what == "lora_A.weight":
            if "alpha" in own:
                parts = [tensor * (float(own["alpha"]) / len(tensor))] * len(targets)
        elif len(targets) > 1 and len(tensor) == sum(sizes):
            parts = [part.contiguous() for part in tensor.split(sizes)]
        for target, part in zip(targets, parts, strict=True):
            made[f"{target}.{what}"] = part
    return made


def _by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))
