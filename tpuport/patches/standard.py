"""What every port of a diffusers pipeline needs, whatever the model."""

from __future__ import annotations

from tpuport.core.layers.exchanged_attention import EXCHANGED_ATTENTION
from tpuport.patches.constants import CONSTANTS
from tpuport.patches.conv import CONVOLUTION
from tpuport.patches.diffusers import CHOSEN_EXPERTS
from tpuport.patches.flex_attention import FLEX_ATTENTION
from tpuport.patches.missing import GELU_ROUNDED_ONCE, MISSING
from tpuport.patches.norms import FLOAT32_NORMS
from tpuport.patches.padding import PADDING
from tpuport.patches.pairs import PAIRS
from tpuport.patches.resize import NEAREST_EXACT_RESIZE, NEAREST_RESIZE
from tpuport.patches.shared_memory import SHARED_MEMORY
from tpuport.patches.torchax_slices import (
    IN_PLACE,
    SLICE_ASSIGNMENT,
    TYPE_AS,
    VIEW_ARRAY,
    VIEW_BOUNDS,
)

PATCHES = (
    *SLICE_ASSIGNMENT,
    VIEW_ARRAY,
    VIEW_BOUNDS,
    IN_PLACE,
    TYPE_AS,
    *SHARED_MEMORY,
    *FLEX_ATTENTION,
    CONSTANTS,
    CHOSEN_EXPERTS,
)
"""What torchax gets wrong or has not, and constants as torch computes them."""

OVERRIDES = (
    *FLOAT32_NORMS,
    GELU_ROUNDED_ONCE,
    NEAREST_RESIZE,
    NEAREST_EXACT_RESIZE,
    CONVOLUTION,
    PADDING,
    *MISSING,
    *PAIRS,
    EXCHANGED_ATTENTION,
)
"""Norms, activations, resizing, convolutions, padding, sums, pairs of lanes and
attention."""
