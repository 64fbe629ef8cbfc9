"""From a checkpoint's file to a shard on a device.

Not here: which rules a model has (its plugin) and which stage needs a weight (spec).
May import: the hall of the core, mesh, files, tracing, layers.
"""
