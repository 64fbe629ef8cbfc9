"""Everything read from disk or written to it: records, images, videos, folders.

Not here: checkpoints (weights) and compiled programs (programs).
May import: the hall of the core, mesh.
"""
