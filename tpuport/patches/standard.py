"""What every port of a diffusers pipeline needs, whatever the model."""

from __future__ import annotations

from tpuport.patches.activations import GELU_ROUNDED_ONCE
from tpuport.patches.conv import CONVOLUTION
from tpuport.patches.flex_attention import FLEX_ATTENTION
from tpuport.patches.norms import FLOAT32_NORMS
from tpuport.patches.padding import PADDING
from tpuport.patches.pairs import PAIRS
from tpuport.patches.reductions import REDUCTIONS
from tpuport.patches.resize import NEAREST_EXACT_RESIZE, NEAREST_RESIZE
from tpuport.patches.timesteps import TIMESTEP_EMBEDDING
from tpuport.patches.torchax_slices import IN_PLACE, SLICE_ASSIGNMENT, VIEW_ARRAY
from tpuport.patches.torchax_types import TYPE_AS

PATCHES = (
    *SLICE_ASSIGNMENT,
    VIEW_ARRAY,
    IN_PLACE,
    TYPE_AS,
    *FLEX_ATTENTION,
    *TIMESTEP_EMBEDDING,
)
"""What torchax gets wrong or has not, and timesteps in float32."""

OVERRIDES = (
    *FLOAT32_NORMS,
    GELU_ROUNDED_ONCE,
    NEAREST_RESIZE,
    NEAREST_EXACT_RESIZE,
    CONVOLUTION,
    PADDING,
    *REDUCTIONS,
)
"""Norms, activations, resizing, convolutions, padding and sums."""

ANY_OVERRIDES = (*OVERRIDES, *PAIRS)
"""And pairs of lanes: native blocks hold no pairs."""
