"""All that a plugin may import.

``ModelPlugin``, ``Module`` and ``Published`` are data: a plugin's own file imports them
and neither torch nor jax. What patches and native blocks are made of is imported when a
name is first read. ``docs/port-a-model.md`` says how to write a plugin.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tpuport.core.spec.component import NativeForm as NativeForm
from tpuport.core.spec.model_plugin import Layout as Layout
from tpuport.core.spec.model_plugin import ModelPlugin as ModelPlugin
from tpuport.core.spec.model_plugin import Module as Module
from tpuport.core.spec.model_plugin import Published as Published
from tpuport.hookspecs import hookimpl as hookimpl

if TYPE_CHECKING:
    from tpuport.core.layers import joint_sequence as joint_sequence
    from tpuport.core.layers import text_and_video as text_and_video
    from tpuport.core.layers import token_norms as token_norms
    from tpuport.core.layers.joint_sequence import JointSequence as JointSequence
    from tpuport.core.layers.text_and_video import Stream as Stream
    from tpuport.core.layers.text_and_video import parameters as parameters
    from tpuport.core.layers.text_and_video import refuse_kwargs as refuse_kwargs
    from tpuport.core.tracing.context import current as current
    from tpuport.core.tracing.forward_split import ForwardSplit as ForwardSplit
    from tpuport.core.tracing.op_overrides import OpOverride as OpOverride
    from tpuport.core.tracing.patching import Patch as Patch
    from tpuport.core.weights.transforms import WeightTransform as WeightTransform
    from tpuport.core.weights.transforms import to_halves as to_halves
    from tpuport.patches import valid_tokens as valid_tokens
    from tpuport.patches.diffusers import diffusers_patch as diffusers_patch

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

_NOW = ("Layout", "ModelPlugin", "Module", "NativeForm", "Published", "hookimpl")
__all__ = sorted((*_NOW, *_LATER))


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"tpuport.plugin has no {name!r}; it has {__all__}")
    module = _LATER[name]
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        return importlib.import_module(f"{module}.{name}")
