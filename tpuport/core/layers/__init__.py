"""What native blocks are made of, split over the mesh, and attention of every model.

Not here: kernels for one chip (tpuport.kernels) and layers of one model (its plugin).
May import: the hall of the core, mesh, files, tracing; tpuport.kernels.
"""
