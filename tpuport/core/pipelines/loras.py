"""LoRAs: found, matched with a pipeline's modules, and fused into their weights.

peft fuses, as upstream's ``fuse_lora`` lets it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.loaders import lora_base
from diffusers.loaders.peft import PeftAdapterMixin
from safetensors import SafetensorError
from safetensors.torch import load_file

from tpuport.core.arrays import all_finite
from tpuport.core.files.atomic import one_line
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.stores import StorePath
from tpuport.core.pipelines.lora_keys import (
    PEFT_PREFIX,
    Matched,
    Modules,
    Names,
    Part,
    layers_of,
    matching,
    quiet,
    scaled,
    takers,
)
from tpuport.core.reports import Reporter, plural
from tpuport.core.spec.lora_choice import LoraChoice, on_hub, the_one
from tpuport.core.weights.hub import fetch, file_names
from tpuport.core.weights.stored_tensors import read_whole
from tpuport.errors import UsageError, damaged

#: What a LoRA is called while it is being fused.
_ADAPTER = "tpuport"
#: Keys that a message lists.
_LISTED = 3

#: What peft's ``save_pretrained`` writes: the weights, and the settings beside.
_PEFT_FILE, _PEFT_SETTINGS = "adapter_model.safetensors", "adapter_config.json"


@dataclass(frozen=True)
class Lora:
    """The file of a LoRA.

    Attributes:
        choice: what was asked for, its file by an absolute path.
        file: on this machine.
        sha256: of the file.
        settings_sha256: of peft's ``adapter_config.json`` beside it; empty for none.
        parts: what is fused into which component, once the LoRA is matched.
    """

    choice: LoraChoice
    file: Path
    sha256: str
    settings_sha256: str = ""
    parts: Mapping[str, Part] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def find(
        cls,
        choice: LoraChoice,
        reporter: Reporter,
        cache: Path | None = None,
        store: StorePath | None = None,
    ) -> Lora:
        """The file that was named, or that is fetched.

        Args:
            cache, store: as of :func:`~tpuport.core.weights.hub.fetch`.

        Raises:
            UsageError: there is no such file, or peft is not installed.
            WeightsError: the file is no safetensors file.
            HubError: the hub cannot be reached, or has no such file.
        """
        file = choice.file() or _fetched(choice.name, reporter, cache, store)
        beside = file.with_name(_PEFT_SETTINGS)
        has_settings = file.name == _PEFT_FILE and beside.is_file()
        settings = hash_output(beside)[0] if has_settings else ""
        return cls(choice.absolute(), file, hash_output(file)[0], settings)

    def as_dict(self) -> dict[str, Any]:
        """For the sidecar."""
        choice = self.choice
        found = {
            "source": choice.name,
            "scale": choice.scale,
            "component": choice.component,
            "sha256": self.sha256,
        }
        if self.settings_sha256:
            found["settings_sha256"] = self.settings_sha256
        return found

    def matched(
        self, kind: Any, modules: Modules, names: Names, reporter: Reporter
    ) -> Lora:
        """The LoRA with its parts; of the modules no weight is read.

        Args:
            kind: the pipeline's class.
            names: that the model's original code has for its layers.
            reporter: told of keys that upstream's loader leaves out, and of an alpha
                that is not known.

        Raises:
            UsageError: a key fits no weight, or the shapes of some do not.
            WeightsError: the file is damaged.
        """
        stored = self._read(reporter)
        component, fit = self.choice.component, takers(kind, modules)
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
        found = matching(stored, kind, fit, component, names, metadata)
        self._check(found, kind, len(stored), fit)
        if found.left_out:
            reporter.say(
                f"LoRA {self.file.name}: upstream leaves out "
                f"{plural(len(found.left_out), 'key')}: {_some(found.left_out)}"
            )
        return replace(self, parts=found.parts)

    def _read(self, reporter: Reporter) -> dict[str, torch.Tensor]:
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
        if not any(key.startswith(PEFT_PREFIX) for key in stored):
            return stored
        if not self.settings_sha256:
            reporter.say(
                f"LoRA {self.file.name}: there is no {_PEFT_SETTINGS} beside "
                f"{_PEFT_FILE}, so alpha is taken to be the rank"
            )
            return stored
        beside = self.file.with_name(_PEFT_SETTINGS)
        try:
            settings = json.loads(beside.read_bytes())
            return scaled(stored, settings)
        except UsageError as error:
            raise UsageError(f"LoRA {self.choice.name}: {error}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise damaged(
                f"LoRA {self.choice.name}: {beside.name} is not what peft writes "
                f"({one_line(error)})"
            ) from error

    def _check(self, found: Matched, kind: Any, count: int, fit: Modules) -> None:
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
            f"{kind.__name__}: {_some(wrong)}; name a LoRA for its {', '.join(fit)}"
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


def _fuse(lora: Lora, name: str, part: Part, module: Any) -> None:
    if getattr(module, "peft_config", None):
        raise UsageError(
            f"LoRA {lora.choice.name}: {name} has adapters already; fuse and unload "
            "them first"
        )
    layers = dict(module.named_modules())
    for path in layers_of(name, part):
        read_whole(layers[path])
    before = set(vars(module))
    asked = {n: p.requires_grad for n, p in module.named_parameters()}
    how: dict[str, Any] = {"adapter_name": _ADAPTER, "low_cpu_mem_usage": True}
    how |= {"network_alphas": part.alphas, "metadata": part.metadata, "prefix": name}
    try:
        with quiet():
            if isinstance(module, ModelMixin):
                with _adaptable(module):
                    module.load_lora_adapter(part.state, **how)
                    module.fuse_lora(lora.choice.scale)
                    module.unload_lora()
            else:
                _fuse_into_text_encoder(module, part.state, lora.choice.scale, how)
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


def _fuse_into_text_encoder(
    module: Any, state: Mapping[str, torch.Tensor], scale: float, how: dict[str, Any]
) -> None:
    """As the pipelines of upstream do that have text encoders with LoRAs."""
    lora_base._load_lora_into_text_encoder(state, text_encoder=module, **how)
    lora_base.fuse_text_encoder_lora(module, scale)
    lora_base._remove_text_encoder_monkey_patch(module)


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


# --- the file


def _fetched(
    name: str, reporter: Reporter, cache: Path | None, store: StorePath | None
) -> Path:
    """The file of a hub id."""
    repo, file = on_hub(name)
    wanted = file or the_one(name, file_names(repo, "--lora", reporter, store))
    files = [wanted]
    if Path(wanted).name == _PEFT_FILE:
        files.append(str(Path(wanted).with_name(_PEFT_SETTINGS)))
    return (fetch(repo, files, reporter, "--lora", cache, store) / wanted).absolute()


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


def _some(keys: Sequence[str]) -> str:
    more = len(keys) - _LISTED
    return ", ".join(keys[:_LISTED]) + (f" and {more} more" if more > 0 else "")
