"""Attention on one device: our splash kernel, the formula, and which one runs.

Not here: how attention is split over a mesh (tpuport.core.layers).
May import: the hall of the kernels.
"""
