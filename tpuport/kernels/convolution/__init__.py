"""Causal convolutions of video autoencoders, and the blocks they work in.

Not here: halos between devices (tpuport.core.mesh) and layers (tpuport.core.layers).
May import: the hall of the kernels.
"""
