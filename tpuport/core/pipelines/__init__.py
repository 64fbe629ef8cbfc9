"""A pipeline's folder, what a user asks of the pipeline, and the record of a run.

Not here: how the pipeline runs (seam).
May import: the hall of the core, spec, files and weights.
"""
