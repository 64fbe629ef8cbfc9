"""Upstream's own objects, ported in place, and given back.

A ported pipeline is the pipeline that was given: its class, config, signature,
callbacks and components stay. What makes no sense on a mesh says so.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName

from tpuport.core.reports import Reporter
from tpuport.core.seam.module_weights import fitting
from tpuport.core.seam.seam import Seam
from tpuport.core.seam.target import Target
from tpuport.errors import UsageError, did_you_mean

#: Methods of a pipeline that place its weights, and what a port does in their stead.
_PLACED = "the port has placed the weights on its mesh, and components take turns there"
_PIPELINE_METHODS = {
    "enable_model_cpu_offload": _PLACED,
    "enable_sequential_cpu_offload": _PLACED,
    "enable_group_offload": _PLACED,
    "reset_device_map": _PLACED,
    "enable_xformers_memory_efficient_attention": "attention runs as tpuport's kernels",
    "enable_attention_slicing": "attention runs as tpuport's kernels, which slice",
}
_MODULE_METHODS = {
    "enable_parallelism": "the mesh splits the work; name it in port(mesh=...)",
    "enable_group_offload": _PLACED,
    "enable_xformers_memory_efficient_attention": "attention runs as tpuport's kernels",
    "enable_layerwise_casting": "leave it out: weights have the dtype of the run",
    "cuda": _PLACED,
    "xpu": _PLACED,
    "compile": "forward is compiled already",
    "compile_repeated_blocks": "forward is compiled already",
}
#: What belongs to the ported object alone is neither copied nor pickled.
_OWNED = {
    "__deepcopy__": "a copy would run the original; copy it before port()",
    "__reduce_ex__": "programs of the devices cannot be pickled; use save_pretrained",
}
_SHOWN = {"__deepcopy__": "copy.deepcopy", "__reduce_ex__": "pickle"}
#: Backends of attention that mean: whatever is best here, exact.
_NATIVE = ("native", "_native_math", "_native_efficient", "_native_xla")

#: Where a ported object keeps its seam, and the attributes that were set for it. The
#: object and its seam go together when nobody holds the object.
_KEPT = "_tpuport"


def modules_of(pipeline: Any) -> dict[str, torch.nn.Module]:
    """The components of a pipeline that are torch modules, by name."""
    return {
        name: component
        for name, component in pipeline.components.items()
        if isinstance(component, torch.nn.Module)
    }


def port_pipeline(
    pipeline: Any,
    target: Target,
    on_host: Collection[str] = (),
    reporter: Reporter | None = None,
) -> Any:
    """Let the modules of ``pipeline`` run as programs; returns ``pipeline``.

    Args:
        pipeline: of diffusers, with its weights on the CPU.
        target: what programs are made for.
        on_host: components that stay plain upstream code.
        reporter: told of programs that are compiled.

    Raises:
        UsageError: it is ported already, or ``on_host`` names no component.
        ShardingError: a plugin's layout does not fit a component.
    """
    components = modules_of(pipeline)
    for name in on_host:
        if name not in components:
            raise UsageError(
                f"on_host={name!r}: {type(pipeline).__name__} has the components "
                f"{', '.join(components)}; "
                + did_you_mean(name, components, "name one of them")
            )
    taken = {name: c for name, c in components.items() if name not in on_host}
    for name, component in taken.items():
        fitting(name, component, target)  # or a refusal, before anything runs
    rest = {n: c for n, c in pipeline.components.items() if n not in components}
    seam = Seam({**taken, **rest}, target, reporter or Reporter())
    # Weak: the pipeline and its seam go together.
    same = functools.partial(_check_same, weakref.ref(pipeline), taken)
    seam.journal.on_call = same
    held = _guard(pipeline, "pipe", _PIPELINE_METHODS)
    for component in taken.values():
        held += _guard(component, "module", _MODULE_METHODS)
    pipeline.__dict__[_KEPT] = seam, held
    return pipeline


def port_module(
    module: torch.nn.Module, target: Target, reporter: Reporter | None = None
) -> torch.nn.Module:
    """A ported twin of ``module``: of its class, with its very tensors.

    ``module`` itself stays upstream's.
    """
    twin: torch.nn.Module = copy.deepcopy(module, {id(t): t for t in _tensors(module)})
    name = type(module).__name__
    seam = Seam({name: twin}, target, reporter or Reporter())
    twin.__dict__[_KEPT] = seam, _guard(twin, "module", _MODULE_METHODS)
    return twin


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    """The tensors that a twin shares, or has a copy of its own of."""
    # Old weight norm keeps a weight that was computed, which torch refuses to copy.
    computed = [
        value
        for child in module.modules()
        for value in vars(child).values()
        if isinstance(value, torch.Tensor) and not value.is_leaf
    ]
    return [*module.parameters(), *module.buffers(), *computed]


def upstreams_twin(module: torch.nn.Module) -> torch.nn.Module:
    """A twin of a module, ported or not, in float32: upstream's code, on the host.

    Float32 tensors are those of ``module``; nobody may write to the twin's.
    """
    memo: dict[int, Any] = {}
    for tensor in _tensors(module):
        own = tensor.detach().float() if tensor.is_floating_point() else tensor.detach()
        if isinstance(tensor, torch.nn.Parameter):
            own = torch.nn.Parameter(own, requires_grad=False)
        memo[id(tensor)] = own
    kind: Any = type(module)
    twin: torch.nn.Module = kind.__new__(kind)
    memo[id(module)] = twin
    state = {name: v for name, v in vars(module).items() if not _stands(kind, name)}
    twin.__dict__.update(copy.deepcopy(state, memo))
    for child in twin.modules():  # without what the seam put there
        for name in [n for n in vars(child) if _stands(type(child), n)]:
            del vars(child)[name]
    return twin


def _stands(kind: type, name: str) -> bool:
    """Whether an attribute stands in the place of a method."""
    return name == _KEPT or callable(getattr(kind, name, None))


def unport(ported: Any) -> Any:
    """Give upstream's own code back, and the devices' memory; returns ``ported``.

    Raises:
        UsageError: it is not ported.
    """
    found = ported.__dict__.pop(_KEPT, None)
    if found is None:
        raise UsageError(
            f"this {type(ported).__name__} is not ported; hand in what tpuport.port() "
            "returned"
        )
    seam, held = found
    for owner, name in held:
        owner.__dict__.pop(name, None)
    seam.close()
    return ported


def is_ported(target: Any) -> bool:
    return _KEPT in vars(target)


def seam_of(ported: Any) -> Seam:
    """The seam of a ported pipeline or module.

    Raises:
        KeyError: it is not ported.
    """
    seam: Seam = ported.__dict__[_KEPT][0]
    return seam


def _guard(owner: Any, what: str, methods: Mapping[str, str]) -> list[tuple[Any, str]]:
    """What makes no sense on a ported pipeline or module says so."""
    known = {name: why for name, why in methods.items() if hasattr(owner, name)}
    refused = {
        name: functools.partial(_refused, _SHOWN.get(name, name), why)
        for name, why in {**known, **_OWNED}.items()
    }
    held = _set(owner, **refused, to=functools.partial(_to, owner.to, what))
    if hasattr(owner, "set_attention_backend"):
        held += _set(owner, set_attention_backend=_set_attention_backend)
    return held


def _set(owner: Any, **values: Callable[..., Any]) -> list[tuple[Any, str]]:
    owner.__dict__.update(values)
    return [(owner, name) for name in values]


def _refused(name: str, why: str, *args: Any, **kwargs: Any) -> None:
    raise UsageError(
        f"{name}() on a ported object: {why}. tpuport.unport() gives upstream's back"
    )


def _check_same(
    pipeline: weakref.ref[Any], taken: Mapping[str, torch.nn.Module], called: str
) -> None:
    """Refuse a call of a pipeline whose component was replaced: nobody ported it."""
    for name, component in taken.items():
        now = getattr(pipeline(), name, component)
        if now is not component:
            raise UsageError(
                f"{name} was replaced by a {type(now).__name__} after port(), which "
                "would run on the host: call tpuport.unport(), replace it, and port()"
            )


def _to(original: Callable[..., Any], what: str, *args: Any, **kwargs: Any) -> Any:
    """``to``: a dtype is taken over, the CPU is where upstream's copy is already."""
    given = [*args, kwargs.get("device")]
    for value in given:
        is_place = isinstance(value, str | torch.device | int)
        if is_place and torch.device(value).type != "cpu":
            raise UsageError(
                f"{what}.to({str(value)!r}) on a ported object: {_PLACED}. "
                "tpuport.unport() gives upstream's back"
            )
    return original(*args, **kwargs)


def _set_attention_backend(backend: str) -> None:
    known = [str(one.value) for one in AttentionBackendName]
    if backend not in known:
        raise UsageError(
            f"set_attention_backend({backend!r}): diffusers has no such backend; leave "
            "the call out, or " + did_you_mean(str(backend), known, "use 'native'")
        )
    if backend not in _NATIVE:
        raise UsageError(
            f"set_attention_backend({backend!r}) on a ported module: attention runs as "
            "tpuport's kernels; name one in port(attention=...), or use 'native'"
        )
