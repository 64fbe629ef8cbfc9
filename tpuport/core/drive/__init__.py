"""One call of a pipeline by upstream's code: watched, recorded, given back, rehearsed.

Not here: how a module's call is answered (seam) and what a command prints (run, cli).
May import: the hall, mesh, files, tracing, layers, weights, spec, programs, pipelines,
seam.
"""
