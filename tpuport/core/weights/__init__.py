"""From a checkpoint's file to a shard on a device.

Not here: which layouts a model has (its plugin).
May import: the hall of the core, mesh, files, tracing, layers.
"""
