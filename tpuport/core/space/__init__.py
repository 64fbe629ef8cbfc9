"""A module's forward on each device's part of the picture, followed and checked.

Which dims are rows and columns is known of the inputs, and followed through the traced
program. What is not local in a picture is refused by name.

Not here: the exchange between neighbours (mesh) and the operations that use it (layers,
patches).
May import: the hall of the core, mesh, tracing.
"""
