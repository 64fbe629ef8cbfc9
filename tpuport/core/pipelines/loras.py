"""LoRAs: found, matched with a pipeline's modules, and fused into their weights.

Upstream's loader of the pipeline's class brings keys to the modules' names, and peft
fuses. Of a class without a loader, and of spellings that upstream's does not know, the
keys are brought to these names here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers import ModelMixin
from diffusers.loaders import StableDiffusionXLLoraLoaderMixin
from diffusers.loaders.peft import PeftAdapterMixin
from diffusers.utils import convert_unet_state_dict_to_peft, logging
from safetensors import SafetensorError
from safetensors.torch import load_file

from tpuport.core.arrays import all_finite
from tpuport.core.enums import denoises
from tpuport.core.files.atomic import one_line
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.reports import Reporter, plural
from tpuport.core.spec.lora_choice import LoraChoice
from tpuport.core.weights.hub import fetch, file_names
from tpuport.core.weights.stored_tensors import read_whole
from tpuport.errors import UsageError, WeightsError, damaged

Modules = Mapping[str, torch.nn.Module]
"""The torch modules of a pipeline, by component."""

Names = Mapping[str, Sequence[str]]
"""Original path of a layer, with ``{}`` for the number of a block -> the paths of
diffusers; the layer's outputs are those of these layers, one after the other."""

#: What a LoRA is called while it is being fused.
_ADAPTER = "tpuport"
#: Keys that a message lists.
_LISTED = 3

_HUB_FILE = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/(.+))?")
_PICKLES = (".bin", ".ckpt", ".pt", ".pth")

#: What trainers put before a layer's path.
_PREFIX = re.compile(
    r"(model\.diffusion_model\.|diffusion_model\.|lora_unet_|lora_transformer_)"
)
#: Endings of keys -> what the tensor is.
_ENDINGS = {
    **dict.fromkeys((".lora_A.weight", ".lora_A.default.weight"), "lora_A.weight"),
    **dict.fromkeys((".lora_B.weight", ".lora_B.default.weight"), "lora_B.weight"),
    **dict.fromkeys((".lora_down.weight", ".lora.down.weight"), "lora_A.weight"),
    **dict.fromkeys((".lora_up.weight", ".lora.up.weight"), "lora_B.weight"),
    **dict.fromkeys((".lora_B.bias", ".diff_b"), "lora_B.bias"),
    ".alpha": "alpha",
}


class _Part(NamedTuple):
    """What a LoRA has for one component, as upstream's ``load_lora_adapter`` takes it.

    Keys and settings begin with the component's name.
    """

    state: dict[str, torch.Tensor]
    alphas: dict[str, float] | None = None
    metadata: dict[str, Any] | None = None


@dataclass
class _Matched:
    """Parts by component, and what is wrong with the keys of the file."""

    parts: dict[str, _Part] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return bool(self.parts) and not self.unknown and not self.shapes


@dataclass(frozen=True)
class Lora:
    """The file of a LoRA.

    Attributes:
        choice: what was asked for, its file by an absolute path.
        file: on this machine.
        sha256: of the file.
        parts: what is fused into which component, once the LoRA is matched.
    """

    choice: LoraChoice
    file: Path
    sha256: str
    parts: Mapping[str, _Part] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def find(cls, choice: LoraChoice, reporter: Reporter) -> Lora:
        """The file that was named, or that is fetched.

        Raises:
            UsageError: there is no such file, or peft is not installed.
            WeightsError: the file is no safetensors file.
            HubError: the hub cannot be reached, or has no such file.
        """
        if importlib.util.find_spec("peft") is None:
            raise UsageError(
                f"LoRA {choice.name}: needs a package that is not installed: pip "
                "install 'tpuport[lora]'"
            )
        file = _file(choice.name, reporter)
        return cls(choice.absolute(), file, hash_output(file)[0])

    def as_dict(self) -> dict[str, Any]:
        """For the sidecar."""
        choice = self.choice
        return {
            "source": choice.name,
            "scale": choice.scale,
            "component": choice.component,
            "sha256": self.sha256,
        }

    def matched(
        self, kind: Any, modules: Modules, names: Names, reporter: Reporter
    ) -> Lora:
        """The LoRA with its parts; of the modules no weight is read.

        Args:
            kind: the pipeline's class.
            names: that the model's original code has for its layers.
            reporter: told of keys that upstream's loader leaves out.

        Raises:
            UsageError: a key fits no weight, or the shapes of some do not.
            WeightsError: the file is damaged.
        """
        stored = self._read()
        component = self.choice.component
        fit = {name: m for name, m in modules.items() if isinstance(m, ModelMixin)}
        if component and component not in fit:
            known = f"{kind.__name__} has {', '.join(fit) or 'none'}"
            raise UsageError(
                f"LoRA {self.choice.name}: {component!r} is neither a scale nor a "
                f"component that takes a LoRA; {known}"
            )
        if not fit:
            raise UsageError(
                f"LoRA {self.choice.name}: no component of {kind.__name__} takes a LoRA"
            )
        metadata = _settings_in(self.file)
        found = _Matched(unknown=list(stored))
        if hasattr(kind, "lora_state_dict"):
            found = _by_upstream(stored, kind, fit, component, metadata)
        if not found.good:
            own = _by_name(stored, fit, component, names, metadata)
            if own.good or len(own.unknown) < len(found.unknown):
                found = own
        self._check(found, kind, len(stored))
        if found.left_out:
            reporter.say(
                f"LoRA {self.file.name}: upstream leaves out "
                f"{plural(len(found.left_out), 'key')}: {_some(found.left_out)}"
            )
        return replace(self, parts=found.parts)

    def _read(self) -> dict[str, torch.Tensor]:
        try:
            stored: dict[str, torch.Tensor] = load_file(self.file)
        except (SafetensorError, OSError) as error:
            raise damaged(
                f"LoRA {self.choice.name}: is truncated or not a safetensors file "
                f"({one_line(error)})"
            ) from error
        for key, tensor in stored.items():
            if not all_finite(tensor.float()):  # of eight bits, torch has no extremes
                raise damaged(
                    f"LoRA {self.choice.name}: {key} holds NaN or infinite values"
                )
        return stored

    def _check(self, found: _Matched, kind: Any, count: int) -> None:
        if found.good:
            return
        if found.shapes and not found.unknown:
            raise UsageError(
                f"LoRA {self.choice.name}: is for another model than this "
                f"{kind.__name__}: {found.shapes[0]}"
            )
        wrong = found.unknown
        raise UsageError(
            f"LoRA {self.choice.name}: of {plural(count, 'key')}, "
            f"{len(wrong) or 'none'} fit {'no' if wrong else 'a'} weight of "
            f"{kind.__name__}: {_some(wrong)}; name a LoRA for this model"
        )


def fuse(loras: Sequence[Lora], modules: Modules) -> None:
    """Add LoRAs to the weights of these modules, as upstream's ``fuse_lora`` does.

    The modules have the layers that they had.

    Args:
        loras: matched.
        modules: some or all of the pipeline's.

    Raises:
        UsageError: a module has adapters already, or upstream refuses the LoRA.
    """
    for lora in loras:
        for name, part in lora.parts.items():
            if name in modules:
                _fuse(lora, name, part, modules[name])


def _fuse(lora: Lora, name: str, part: _Part, module: Any) -> None:
    if getattr(module, "peft_config", None):
        raise UsageError(
            f"LoRA {lora.choice.name}: {name} has adapters already; fuse and unload "
            "them first"
        )
    layers = dict(module.named_modules())
    for path in {_layer(key.removeprefix(f"{name}.")) for key in part.state}:
        read_whole(layers[path])
    before = set(vars(module))
    asked = {n: p.requires_grad for n, p in module.named_parameters()}
    try:
        with quiet(), _adaptable(module):
            module.load_lora_adapter(
                part.state,
                prefix=name,
                network_alphas=part.alphas,
                metadata=part.metadata,
                adapter_name=_ADAPTER,
                low_cpu_mem_usage=True,
            )
            module.fuse_lora(lora.choice.scale)
            module.unload_lora()
    except (RuntimeError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"LoRA {lora.choice.name}: upstream refuses it for {name}: "
            f"{one_line(error)}"
        ) from error
    # What upstream leaves behind would make programs of the module other programs.
    for added in vars(module).keys() - before:
        delattr(module, added)
    for path, parameter in module.named_parameters():
        parameter.requires_grad_(asked[path])


@contextlib.contextmanager
def _adaptable(module: torch.nn.Module) -> Iterator[None]:
    """Give a module upstream's methods for adapters; some classes lack them."""
    kind: Any = type(module)
    if not issubclass(kind, PeftAdapterMixin):
        module.__class__ = type(kind.__name__, (kind, PeftAdapterMixin), {})
    try:
        yield
    finally:
        module.__class__ = kind


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No warnings of upstream's loaders: what they warn of is refused here."""
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


# --- the file


def _file(name: str, reporter: Reporter) -> Path:
    path = Path(name).expanduser()
    found = path
    if not path.exists():
        hub = _HUB_FILE.fullmatch(name)
        if hub is None or name.endswith(_PICKLES) or _looks_local(name):
            _refuse_pickle(name, path)
            raise UsageError(
                f"LoRA {name} does not exist, and it is no hub id (owner/name, or "
                "owner/name/file.safetensors) either"
            )
        wanted = hub[2] or _the_one(name, file_names(hub[1], "--lora"))
        found = fetch(hub[1], [wanted], reporter, "--lora") / wanted
    elif path.is_dir():
        found = path / _the_one(name, [p.name for p in sorted(path.iterdir())])
    _refuse_pickle(name, found)
    if not found.is_file():
        raise UsageError(f"LoRA {name}: there is no file {found.name}")
    return found.absolute()


def _looks_local(name: str) -> bool:
    """Whether a name of two parts is a file's, and no hub id."""
    return name.count("/") == 1 and name.endswith(".safetensors")


def _refuse_pickle(name: str, path: Path) -> None:
    if path.suffix in _PICKLES:
        raise WeightsError(
            f"LoRA {name}: is a pickle file; pickle files can run code and are not "
            "read. Convert it to safetensors"
        )


def _the_one(name: str, files: Sequence[str]) -> str:
    """The one file of a LoRA among the files of a folder."""
    there = [f for f in files if f.endswith(".safetensors")]
    usual = [f for f in there if f.endswith("pytorch_lora_weights.safetensors")]
    if len(usual or there) == 1:
        return (usual or there)[0]
    pickles = [f for f in files if f.endswith(_PICKLES)]
    if not there and pickles:
        _refuse_pickle(f"{name}/{pickles[0]}", Path(pickles[0]))
    if not there:
        raise UsageError(f"LoRA {name}: holds no safetensors file")
    raise UsageError(
        f"LoRA {name}: holds {len(there)} safetensors files; name one, such as "
        f"{name.rstrip('/')}/{there[0]}"
    )


def _settings_in(file: Path) -> dict[str, Any] | None:
    """The ``LoraConfig`` that ``save_lora_weights`` writes into the header."""
    from diffusers.utils.state_dict_utils import _load_sft_state_dict_metadata

    try:
        found: dict[str, Any] | None = _load_sft_state_dict_metadata(str(file))
    except ValueError as error:
        raise damaged(
            f"LoRA {file}: its header is no JSON: {one_line(error)}"
        ) from error
    return found


def _of(component: str, metadata: dict[str, Any] | None) -> dict[str, Any] | None:
    """The settings, if there are some for a component."""
    known = any(key.startswith(f"{component}.") for key in metadata or ())
    return metadata if known else None


# --- by upstream's loader


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


def _by_upstream(
    stored: Mapping[str, torch.Tensor],
    kind: Any,
    modules: Modules,
    component: str,
    metadata: dict[str, Any] | None,
) -> _Matched:
    """The parts that upstream's loader makes of a file."""
    how: dict[str, Any] = {}
    if "unet" in modules and issubclass(kind, StableDiffusionXLLoraLoaderMixin):
        how["unet_config"] = modules["unet"].config  # as its load_lora_weights does
    try:
        with quiet():
            traced = {key: _traced(key, tensor) for key, tensor in stored.items()}
            state, *more = kind.lora_state_dict(
                traced, return_lora_metadata=True, **how
            )
    except Exception:  # of a spelling that it does not know, whatever it raises
        return _Matched(unknown=list(stored))
    alphas = more[0] if len(more) > 1 else None
    used = frozenset[str]().union(
        *(getattr(tensor, "keys", ()) for tensor in state.values())
    )
    found = _Matched()
    for key in stored.keys() - used:
        if key.endswith((".diff", ".diff_b")):
            found.left_out.append(key)
        elif not key.endswith(".alpha"):
            found.unknown.append(key)
    found.left_out.sort()
    by_component: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        named, _, rest = key.partition(".")
        plain = tensor.as_subclass(torch.Tensor)
        by_component.setdefault(named, {})[rest] = plain
    if component and len(by_component) == 1:
        (only,) = by_component
        by_component = {component: by_component[only]}
        metadata, alphas = _renamed(metadata, only, component), alphas
        alphas = _renamed(alphas, only, component)
    for named, own in by_component.items():
        if named not in modules:
            found.unknown += [f"{named}.{rest}" for rest in own]
            continue
        if not any("lora_A" in key or ".lokr_" in key for key in own):
            own = convert_unet_state_dict_to_peft(own)
        _fit(named, modules[named], own, found)
        state = {f"{named}.{rest}": tensor for rest, tensor in own.items()}
        found.parts[named] = _Part(state, alphas, _of(named, metadata))
    return found


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


def _fit(
    component: str,
    module: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    found: _Matched,
) -> None:
    """Note the keys that fit no layer, and the shapes that do not fit theirs."""
    layers = dict(module.named_modules())
    for key, tensor in state.items():
        path = _layer(key)
        weight = getattr(layers.get(path), "weight", None)
        if path == key or not isinstance(weight, torch.Tensor):
            found.unknown.append(f"{component}.{key}")
            continue
        other = {"lora_A": "lora_B", "lora_B": "lora_A"}
        for one, second in other.items():
            needed = f"{path}.{second}.weight"
            if key == f"{path}.{one}.weight" and needed not in state:
                found.unknown.append(f"{component}.{key} without {needed}")
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
                f"{component}.{key} is {_by(tensor.shape)}, and {_by(wanted)} is needed"
            )


# --- by the names of the modules


def _by_name(
    stored: Mapping[str, torch.Tensor],
    modules: Modules,
    component: str,
    names: Names,
    metadata: dict[str, Any] | None,
) -> _Matched:
    """The parts of a file whose layers are called as modules are, or their originals.

    Dots in a path may be underscores, as kohya's trainers write them.
    """
    found = _Matched()
    layers: dict[tuple[str, tuple[str, ...]], dict[str, torch.Tensor]] = {}
    known = {name: _spellings(module, names) for name, module in modules.items()}
    first = next((n for n in modules if denoises(n)), next(iter(modules)))
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
            found.unknown.append(key)
            continue
        layers.setdefault((named, targets), {})[_ENDINGS[ending]] = tensor
    scaled = any("alpha" in own for own in layers.values())
    states: dict[str, dict[str, torch.Tensor]] = {}
    for (named, targets), tensors in layers.items():
        made = _split(tensors, targets, dict(modules[named].named_modules()))
        states.setdefault(named, {}).update(made)
    for named, state in states.items():
        _fit(named, modules[named], state, found)
        whole = {f"{named}.{rest}": tensor for rest, tensor in state.items()}
        found.parts[named] = _Part(
            whole, None, None if scaled else _of(named, metadata)
        )
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


def _some(keys: Sequence[str]) -> str:
    more = len(keys) - _LISTED
    return ", ".join(keys[:_LISTED]) + (f" and {more} more" if more > 0 else "")
