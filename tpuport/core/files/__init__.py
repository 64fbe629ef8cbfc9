"""Everything read from disk or written to it: runs, tensors, images, videos.

Not here: checkpoints (weights) and compiled programs (programs).
May import: the hall of the core, mesh.
"""
