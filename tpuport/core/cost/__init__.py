"""What a compiled program costs a chip: reads text, runs nothing.

Not here: tracing or compiling a model (plan).
May import: the hall of the core, mesh, files, tracing; tpuport.kernels.
"""
