"""Norms that read their tokens or pixels once, with modulation or rotation.

Not here: norms split over a mesh (tpuport.core.layers).
May import: the hall of the kernels.
"""
