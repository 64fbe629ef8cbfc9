"""What native blocks and decoders are made of, split over the mesh.

Not here: kernels for one chip (tpuport.kernels) and layers of one model (its plugin).
May import: the hall of the core, mesh, files, tracing; tpuport.kernels.
"""
