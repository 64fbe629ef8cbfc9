"""Patches and op overrides for what several models' upstream code does.

Not here: patches of one model (its plugin) and layers of its own (tpuport.core.layers).
May import: tpuport.kernels, tpuport.core.
"""
