"""All that a plugin may import.

``ModelPlugin``, ``Module`` and ``Published`` are data: a plugin's own file imports them
and neither torch nor jax. What patches and native blocks are made of is imported when a
name is first read. ``docs/port-a-model.md`` says how to write a plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpuport.core.spec.component import NativeForm
from tpuport.core.spec.model_plugin import Layout, ModelPlugin, Module, Published
from tpuport.hookspecs import hookimpl

if TYPE_CHECKING:
    from tpuport.core.layers import joint_sequence, text_and_video, token_norms
    from tpuport.core.layers.joint_sequence import JointSequence
    from tpuport.core.layers.text_and_video import (
        Stream,
        parameters,
        refuse_kwargs,
    )
    from tpuport.core.tracing.context import current
    from tpuport.core.tracing.forward_split import ForwardSplit
    from tpuport.core.tracing.op_overrides import OpOverride
    from tpuport.core.tracing.patching import Patch
    from tpuport.core.weights.transforms import WeightTransform, to_halves
    from tpuport.patches import valid_tokens
    from tpuport.patches.diffusers import diffusers_patch

_LATER = {
    "ForwardSplit": "tpuport.core.tracing.forward_split",
    "JointSequence": "tpuport.core.layers.joint_sequence",
    "OpOverride": "tpuport.core.tracing.op_overrides",
    "Patch": "tpuport.core.tracing.patching",
    "Stream": "tpuport.core.layers.text_and_video",
    "WeightTransform": "tpuport.core.weights.transforms",
    "current": "tpuport.core.tracing.context",
    "diffusers_patch": "tpuport.patches.diffusers",
    "joint_sequence": "tpuport.core.layers",
    "parameters": "tpuport.core.layers.text_and_video",
    "refuse_kwargs": "tpuport.core.layers.text_and_video",
    "text_and_video": "tpuport.core.layers",
    "to_halves": "tpuport.core.weights.transforms",
    "token_norms": "tpuport.core.layers",
    "valid_tokens": "tpuport.patches",
}
"""Name -> the module that has it, which needs torch or jax."""

__all__ = [
    "ForwardSplit",
    "JointSequence",
    "Layout",
    "ModelPlugin",
    "Module",
    "NativeForm",
    "OpOverride",
    "Patch",
    "Published",
    "Stream",
    "WeightTransform",
    "current",
    "diffusers_patch",
    "hookimpl",
    "joint_sequence",
    "parameters",
    "refuse_kwargs",
    "text_and_video",
    "to_halves",
    "token_norms",
    "valid_tokens",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"tpuport.plugin has no {name!r}; it has {__all__}")
    module = _LATER[name]
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")
