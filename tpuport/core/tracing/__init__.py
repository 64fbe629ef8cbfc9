"""Torch code as a JAX function: overrides, patches, blocks under one scan.

Not here: arithmetic of a model (layers) and anything that reads weights (weights).
May import: the hall of the core, mesh.
"""
