"""Everything that a compiled program depends on, as one value that can be compared.

Two programs with equal keys are the same program. What a program computes is told by a
hash of what was traced; the other fields say in words why two programs differ. So every
process traces, and what is loaded is what would have been compiled.
"""

from __future__ import annotations

import hashlib
import json
import platform as machine
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import torch

from tpuport.core import compat
from tpuport.core.files.fingerprint import version
from tpuport.core.files.sealed_json import canonical
from tpuport.core.files.typed import checked
from tpuport.core.mesh.compiler_flags import flags_for
from tpuport.core.mesh.device_memory import on_host

#: Raised when the meaning of a field changes.
KEY_VERSION = 2

#: Settings of jax that change what is traced or how it is compiled.
_JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_disable_most_optimizations",
    "jax_enable_x64",
    "jax_exec_time_optimization_effort",
    "jax_memory_fitting_effort",
    "jax_memory_fitting_level",
    "jax_numpy_dtype_promotion",
    "jax_optimization_level",
    "jax_threefry_partitionable",
    "jax_use_shardy_partitioner",
)

_PACKAGES = ("jax", "jaxlib", "torch", "torchax")

#: The program of a whole component.
WHOLE = "forward"
#: In place of a component: upstream's arithmetic between the calls of modules.
ARITHMETIC = "arithmetic"
#: Of a config, what tells of loading and not of the model.
_LOADING = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")

#: How a difference names fields.
_NAMES = {"host": "processor", "version": "key version"}
#: Arrays named one by one before the others are counted.
_NAMED = 3
#: Of an array that streams from the host's memory.
_WAITS = " on the host"
#: Two values that are longer together are not printed.
_LONG = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramKey:
    """All inputs of one executable.

    Attributes:
        model: the class of the module.
        component: of the pipeline, whose weights it takes.
        program: the path of the module in the component.
        config: the module's config, upstream's bookkeeping left out.
        weights: name -> dtype, shape and split of every weight.
        arguments: the same for other arguments, by place.
        structure: a hash of what was traced.
        platform, chip, compiler: where it runs, and the compiler's own version.
        mesh: axis -> size.
        devices: number, process and place in the slice of each device, in order.
        host: the processor, where programs are compiled for it.
        versions: of the packages that trace and compile.
        flags: XLA's and libtpu's, as set for the process and by
            :mod:`tpuport.core.mesh.compiler_flags`.
        settings: of jax.
    """

    model: str
    component: str
    program: str
    config: Mapping[str, Any]
    weights: Mapping[str, str]
    arguments: Mapping[str, str]
    structure: str
    platform: str
    chip: str
    compiler: str
    mesh: Mapping[str, int]
    devices: tuple[str, ...]
    host: str
    versions: Mapping[str, str]
    flags: tuple[str, ...]
    settings: Mapping[str, Any]
    version: int = KEY_VERSION

    @property
    def name(self) -> str:
        """For people: ``transformer/forward``."""
        return f"{self.component}/{self.program}"

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that stand for the identity."""
        return hashlib.sha256(canonical(self.as_dict())).hexdigest()

    @property
    def streams(self) -> bool:
        """Whether weights wait in the host's memory."""
        return any(_WAITS in text for text in self.weights.values())

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], file: object) -> ProgramKey:
        """The inverse of :meth:`as_dict`.

        Args:
            file: what it was read from, for messages.

        Raises:
            ValueError: it is of another version.
            ArtifactError: a field is of another type.
        """
        if data.get("version") != KEY_VERSION:
            raise ValueError(f"key version {data.get('version')}, not {KEY_VERSION}")
        return checked(cls, data, file, "compile again", at="key")

    def difference(self, other: ProgramKey) -> tuple[str, ...]:
        """What differs, in words, ``other``'s value first; empty for the same program.

        Such as ``"mesh sp=4 -> sp=8"``. What follows from another platform, chip or
        mesh (the processor, the compiler, the devices) is left out.
        """
        before, after = other.as_dict(), self.as_dict()

        def named(*names: str) -> list[str]:
            old, new = ({n: key[n] for n in names} for key in (before, after))
            return differences(old, new)

        same = self.platform == other.platform
        shapes = _arrays(before, after, "arguments")
        if not shapes and self.structure != other.structure:
            shapes = ["what is traced changed"]
        gone = [flag for flag in other.flags if flag not in self.flags]
        come = [flag for flag in self.flags if flag not in other.flags]
        return (
            *named("model", "component", "program", "platform", "chip", "mesh"),
            *(named("devices") if same and self.mesh == other.mesh else ()),
            *(named("host") if same else ()),
            *differences(other.config, self.config, f"{self.component} "),
            *shapes,
            *_arrays(before, after, "weights"),
            *differences(other.versions, self.versions),
            *(named("compiler") if self.chip == other.chip else ()),
            *(f"compiler flag {flag} is not set now" for flag in gone),
            *(f"compiler flag {flag} is set now" for flag in come),
            *differences(other.settings, self.settings),
            *named("version"),
        )


def module_key(
    name: str,
    module: torch.nn.Module | None,
    mesh: jax.sharding.Mesh,
    weights: Mapping[str, Any],
    program: jax.stages.Lowered,
    stages: Sequence[str],
) -> ProgramKey:
    """The key of one program of a module.

    Args:
        name: the component, and the path within.
        module: ``None`` for :data:`ARITHMETIC`.
        weights: as the program takes them, or ``ShapeDtypeStruct``.
        program: from :func:`lowered`.
        stages: what it was compiled for, as the table of the compiler's flags says.
    """
    component, _, path = name.partition(".")
    given = jax.tree.leaves(program.in_avals)[len(weights) :]
    return ProgramKey(
        model=ARITHMETIC if module is None else type(module).__name__,
        component=component,
        program=path or WHOLE,
        config={} if module is None else config_of(module),
        weights={key: array_text(value) for key, value in sorted(weights.items())},
        arguments={f"[{i}]": str(one) for i, one in enumerate(given)},
        structure=hashlib.sha256(program.as_text().encode()).hexdigest(),
        **device_fields(mesh, *stages),
    )


def device_fields(mesh: jax.sharding.Mesh, *stages: str) -> dict[str, Any]:
    """The fields of a key that the devices and the compiler decide.

    Args:
        stages: as :func:`~tpuport.core.mesh.compiler_flags.choose_flags` takes them.
    """
    devices = list(mesh.devices.flat)
    platform = str(devices[0].platform)
    flags = (*compat.compiler_flags(), *flags_for(devices[0], *stages).texts)
    packages = (*_PACKAGES, "libtpu") if platform == "tpu" else _PACKAGES
    return {
        "mesh": {axis: int(size) for axis, size in mesh.shape.items()},
        "platform": platform,
        "chip": str(devices[0].device_kind),
        "compiler": " ".join(str(devices[0].client.platform_version).split()),
        "devices": tuple(_device(device) for device in devices),
        "host": host_name() if platform == "cpu" else "",
        "versions": {
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            **{name: version(name) or "none" for name in packages},
        },
        "flags": tuple(sorted(flags)),
        "settings": {name: getattr(jax.config, name, None) for name in _JAX_SETTINGS},
    }


def host_name() -> str:
    """The processor of this machine: its name, and a hash of what it can do.

    A program compiled for another one may use instructions that this one lacks.
    """
    info = Path("/proc/cpuinfo")
    # Of the first processor.
    lines = info.read_text().split("\n\n")[0].splitlines() if info.is_file() else []
    pairs = (line.partition(":") for line in lines)
    found = {key.strip(): value.strip() for key, _, value in pairs}
    name = found.get("model name") or machine.processor() or machine.machine()
    features = found.get("flags") or found.get("Features") or machine.version()
    digest = hashlib.sha256(" ".join(sorted(features.split())).encode()).hexdigest()
    return f"{machine.system()} {machine.machine()}, {name}, features {digest[:12]}"


def config_of(module: torch.nn.Module) -> dict[str, Any]:
    """The config of a module with its defaults filled in, as JSON."""
    config = getattr(module, "config", None)
    if config is None:
        return {}
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config)
    found: dict[str, Any] = _without(json.loads(json.dumps(values, default=str)))
    return {
        key: value
        for key, value in found.items()
        if not key.startswith("_") and key != "architectures"
    }


def _without(config: Any) -> Any:
    """A config without what tells of loading: versions are keyed on their own."""
    if isinstance(config, dict):
        return {k: _without(v) for k, v in config.items() if k not in _LOADING}
    return config


def array_text(leaf: Any) -> str:
    """Dtype, shape, split and memory of an array: ``bfloat16[2, 226, 4096]``."""
    shape = ", ".join(map(str, leaf.shape))
    parts = list(getattr(leaf.sharding, "spec", ()))
    while parts and parts[-1] is None:
        parts.pop()
    waits = _WAITS if on_host(leaf) else ""
    text = f"{leaf.dtype}[{shape}]{waits}"
    return f"{text} split {tuple(parts)}" if parts else text


def _device(device: Any) -> str:
    """Number, process and place; a place is told by TPUs alone."""
    coords = getattr(device, "coords", None)
    core = getattr(device, "core_on_chip", 0)
    at = "" if coords is None else f" at {tuple(coords)}.{core}"
    return f"{device.id} of process {device.process_index}{at}"


def _pairs(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[tuple[str, Any, Any]]:
    """Name, value before and value after of the entries that differ."""
    return [
        (name, before.get(name), after.get(name))
        for name in dict.fromkeys((*after, *before))
        if before.get(name) != after.get(name)
    ]


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = ""
) -> list[str]:
    """Every entry that differs, in words; long configs are many small entries."""
    found = []
    for name, *values in _pairs(before, after):
        old, new = map(_text, values)
        how = f"{old} -> {new}" if len(old) + len(new) <= _LONG else "changed"
        found.append(f"{prefix}{_NAMES.get(name, name)} {how}")
    return found


def _text(value: Any) -> str:
    if value is None or value == "":
        return "none"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={item}" for key, item in value.items())
    return value if isinstance(value, str) else json.dumps(value)


def _arrays(
    before: Mapping[str, Any], after: Mapping[str, Any], field: str
) -> list[str]:
    pairs = _pairs(before[field], after[field])
    # What changed its shape says more than what came or went with it.
    pairs.sort(key=lambda pair: pair[1] is None or pair[2] is None)
    # ``['inputs']['latents']`` becomes ``inputs.latents``.
    texts = [
        f"{path.lstrip('.')} {old or 'none'} -> {new or 'none'}"
        for name, old, new in pairs[:_NAMED]
        for path in [name.replace("']", "").replace("['", ".")]
    ]
    left = len(pairs) - len(texts)
    return [*texts, f"{left} more {field}"] if left else texts
