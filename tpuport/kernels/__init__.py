"""Kernels for one chip: arrays in, arrays out, JAX alone.

Here itself only what all kernels share: padding and phantom elements.
Rooms: convolution, norms, products, attention; none imports another, or the core.
"""
