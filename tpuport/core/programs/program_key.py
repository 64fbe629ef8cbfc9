"""Everything that a compiled program depends on, as one value that can be compared.

Two programs with equal keys are the same program. No part of a key is found by tracing,
so a key is known before any time is spent. A plugin's program is a pure function
declared with its port. It depends on the source, the component's config, the options
named here and its arguments, and on nothing else.
"""

from __future__ import annotations

import functools
import hashlib
import json
import platform as machine
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import torch

from tpuport.core import compat
from tpuport.core.files.fingerprint import version
from tpuport.core.files.sealed_json import canonical
from tpuport.core.files.typed import checked
from tpuport.core.mesh.compiler_flags import flags_for
from tpuport.core.programs.components import Components
from tpuport.core.programs.key_differences import differing
from tpuport.core.programs.lowering import Traceable
from tpuport.core.spec.choices import (
    attention_of,
    chosen_of,
    dtype_of,
    implementation_of,
)
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.request import Request
from tpuport.core.spec.run_settings import RunSettings

_OWN = __name__.partition(".")[0]

#: Parts of tpuport that no program is traced from. In a checkout the command line lies
#: elsewhere than in an installed package, so it could not be hashed alike.
_LEFT_OUT = ("cli",)

#: Told by their versions; a patch may put one of their functions in place of another.
_BY_VERSION = frozenset(
    ("diffusers", "jax", "jaxlib", "numpy", "torch", "torchax", "transformers")
)

#: Raised when the meaning of a field changes.
KEY_VERSION = 1

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

#: What of a request is told with a difference; the program sees it in its shapes alone.
_CONTEXT = (
    *("height", "width", "num_frames", "batch_size", "task"),
    *("num_inference_steps", "guidance_scale"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramKey:
    """All inputs of one executable.

    Attributes:
        model, form: the port.
        stage, program, component: which of its programs, and whose weights it takes.
        options: static options: dtype, matmul precision, attention, sharding layout,
            the component's implementation, step cache, donation.
        config: the component's config, upstream's bookkeeping left out.
        weights: name -> dtype, shape and split of every weight.
        arguments: the same for carry, constants and inputs, by path.
        structure: how the arguments nest.
        platform, chip, compiler: where it runs, and the compiler's own version.
        mesh: axis -> size.
        devices: number, process and place in the slice of each device, in order.
        host: the processor, where programs are compiled for it.
        source: package -> hash of its files.
        versions: of the packages that trace and compile.
        flags: XLA's and libtpu's, as set for the process and by
            :mod:`tpuport.core.mesh.compiler_flags`.
        settings: of jax.
        context: size, frames, steps and guidance of the request it was first made for.
            It says why shapes differ and is no part of the identity.
    """

    model: str
    form: str
    stage: str
    program: str
    component: str
    options: Mapping[str, Any]
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
    source: Mapping[str, str]
    versions: Mapping[str, str]
    flags: tuple[str, ...]
    settings: Mapping[str, Any]
    context: Mapping[str, Any] = field(default_factory=dict)
    version: int = KEY_VERSION

    @property
    def name(self) -> str:
        """For people: ``denoise/step``."""
        return f"{self.stage}/{self.program}"

    @property
    def digest(self) -> str:
        """64 hexadecimal digits that stand for the identity."""
        values = self.as_dict()
        del values["context"]
        return hashlib.sha256(canonical(values)).hexdigest()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
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

        Such as ``"frames 49 -> 81"``. A difference of the request alone is none.
        """
        return differing(other.as_dict(), self.as_dict())


def program_key(
    components: Components, asked: Traceable, request: Request
) -> ProgramKey:
    """The key of one program of a stage; nothing is traced.

    Args:
        components: of the session.
        asked: the program; its weights may be ``ShapeDtypeStruct``.
        request: for the step cache, and to tell differences in its words.
    """
    named = dict(zip(("carry", "constants", "inputs"), asked.args, strict=True))
    leaves, tree = jax.tree_util.tree_flatten_with_path(named)
    known = session_fields(components, asked.stage, asked.program.component)
    # A program that is not the port's own is what step caching made of one.
    own = asked.name in components.port.stage(asked.stage).programs
    known["options"] |= {
        "step_cache": "none" if own else cache_method(request),
        "donate": asked.program.donate,
    }
    weights = sorted(asked.loaded.weights.items())
    return ProgramKey(
        stage=asked.stage,
        program=asked.name,
        **known,
        weights={key: array_text(value) for key, value in weights},
        arguments={
            jax.tree_util.keystr(path): array_text(leaf) for path, leaf in leaves
        },
        structure=str(tree),
        context=context_of(request, components.port),
    )


def context_of(request: Request, port: ModelPort) -> dict[str, Any]:
    """What of a request explains why the shapes of its programs differ."""
    known = {name: getattr(request, name) for name in _CONTEXT}
    return {**known, "guided": port.guided(request)}


def cache_method(request: Request) -> str:
    """The part of a step cache in a key: method and order, not which steps are full."""
    cache = request.step_cache
    if cache is None:
        return "none"
    return cache.method if cache.order is None else f"{cache.method}:{cache.order}"


def session_fields(
    components: Components, stage: str, component: str
) -> dict[str, Any]:
    """The fields of a key that are known before the arguments of a program are."""
    runtime = components.runtime(component)
    port = components.port
    known = settings_fields(port, component, components.settings)
    known["options"]["matmul_precision"] = runtime.matmul_precision
    return {
        **known,
        **device_fields(components.mesh, stage),
        "config": config_of(components.skeleton(component)),
        "source": {name: source_hash(name) for name in port_packages(port)},
        "versions": _versions(components, component),
    }


def device_fields(mesh: jax.sharding.Mesh, *stages: str) -> dict[str, Any]:
    """The fields of a key that the devices and the compiler decide.

    Args:
        stages: as :func:`~tpuport.core.mesh.compiler_flags.choose_flags` takes them.
    """
    devices = list(mesh.devices.flat)
    platform = str(devices[0].platform)
    flags = (*compat.compiler_flags(), *flags_for(devices[0], *stages).texts)
    return {
        "mesh": {axis: int(size) for axis, size in mesh.shape.items()},
        "platform": platform,
        "chip": str(devices[0].device_kind),
        "compiler": " ".join(str(devices[0].client.platform_version).split()),
        "devices": tuple(_device(device) for device in devices),
        "host": host_name() if platform == "cpu" else "",
        "versions": _packages_of(platform),
        "flags": tuple(sorted(flags)),
        "settings": {name: getattr(jax.config, name, None) for name in _JAX_SETTINGS},
    }


def settings_fields(
    port: ModelPort, component: str, settings: RunSettings
) -> dict[str, Any]:
    """The fields of a key that settings decide, with neither weights nor devices.

    Args:
        port: the form of the model, with its blocks and implementations in place.
        component: of the program.
        settings: how to run; a dtype and a mesh that are not known are left out.
    """
    known: dict[str, Any] = {
        "model": port.name,
        "form": port.form,
        "component": component,
        "options": {
            "attention": str(attention_of(port, component, settings.attention)),
            "sharding": settings.sharding,
            "blocks": port.blocks,
            "implementation": chosen_of(port, component),
        },
    }
    if settings.dtype is not None:
        known["options"]["dtype"] = dtype_of(port, component, settings.dtype)
    if settings.mesh is not None and -1 not in settings.mesh.shape.values():
        known["mesh"] = dict(settings.mesh.shape)
    return known


def _versions(components: Components, component: str) -> dict[str, str]:
    """The versions of what traces and compiles a component, Python's first."""
    implementation = implementation_of(components.port, component)
    packages = implementation.packages if implementation else ()
    return {
        **_packages_of(components.platform),
        **{name: version(name) or "none" for name in packages},
        **upstream_versions(components.port),
    }


def _packages_of(platform: str) -> dict[str, str]:
    packages = (*_PACKAGES, "libtpu") if platform == "tpu" else _PACKAGES
    return {
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        **{name: version(name) or "none" for name in packages},
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
    # Which upstream wrote the file, and where from: versions are keyed on their own.
    left_out = {"transformers_version", "architectures", "torch_dtype", "dtype"}
    return {
        key: value
        for key, value in json.loads(json.dumps(values, default=str)).items()
        if not key.startswith("_") and key not in left_out
    }


def array_text(leaf: Any) -> str:
    """Dtype, shape and split of an array, such as ``bfloat16[2, 226, 4096]``."""
    shape = ", ".join(map(str, leaf.shape))
    parts = list(getattr(leaf.sharding, "spec", ()))
    while parts and parts[-1] is None:
        parts.pop()
    text = f"{leaf.dtype}[{shape}]"
    return f"{text} split {tuple(parts)}" if parts else text


def _device(device: Any) -> str:
    """Number, process and place; a place is told by TPUs alone."""
    coords = getattr(device, "coords", None)
    core = getattr(device, "core_on_chip", 0)
    at = "" if coords is None else f" at {tuple(coords)}.{core}"
    return f"{device.id} of process {device.process_index}{at}"


def port_packages(port: ModelPort) -> tuple[str, ...]:
    """The packages that the code of a port comes from, tpuport's own first.

    A package that was installed under a version (diffusers, transformers) is told by
    that and not listed: see :func:`version`.
    """
    functions: list[Any] = []
    for form in port.all_forms:
        for stage in form.stages:
            functions += [stage.plan, *(p.fn for p in stage.programs.values())]
        functions += [patch.replacement for patch in form.patches]
        functions += [override.make for override in form.overrides]
        # Of the blocks in place; patches of native blocks are among the form's.
        transforms = [t for c in form.components.values() for t in c.transforms]
        functions += [transform.apply for transform in transforms]
        chosen = [implementation_of(form, name) for name in form.components]
        functions += [found.weights for found in chosen if found is not None]
    names = {_package(function) for function in functions}
    for component in port.components.values():
        package = component.class_path.partition(":")[0].partition(".")[0]
        if version(package) is None:
            names.add(package)
    names -= {_OWN, "", *_BY_VERSION}
    others = sorted(name for name in names if name in sys.modules)
    return (_OWN, *others)


def upstream_versions(port: ModelPort) -> dict[str, str]:
    """The versions of the packages that the components' classes come from."""
    names = {c.class_path.partition(":")[0] for c in port.components.values()}
    found = {name: version(name) for name in {n.partition(".")[0] for n in names}}
    return {name: text for name, text in sorted(found.items()) if text is not None}


@functools.cache
def source_hash(package: str) -> str:
    """Sha256 over the names and contents of a package's files, or of a module's file.

    Every file counts, data as well; compiled Python does not. Found once per process:
    what runs is what was imported.
    """
    module = sys.modules[package]
    digest = hashlib.sha256()
    for name, path in sorted(_files(module)):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _files(module: Any) -> Iterator[tuple[str, Path]]:
    folders = [Path(folder) for folder in getattr(module, "__path__", ())]
    if not folders and getattr(module, "__file__", None):
        yield Path(module.__file__).name, Path(module.__file__)
    for folder in folders:
        for path in folder.rglob("*"):
            parts = path.relative_to(folder).parts
            skipped = parts[0] in _LEFT_OUT or "__pycache__" in parts
            if not skipped and path.is_file():
                yield "/".join(parts), path


def _package(function: Any) -> str:
    if isinstance(function, str):
        return function.partition(":")[0].partition(".")[0]
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__module__", None) or type(function).__module__
    return "" if name == "builtins" else str(name).partition(".")[0]
