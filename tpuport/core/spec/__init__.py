"""What a plugin says and what a user asks for, as data.

Not here: anything that runs, compiles or touches a device.
May import: the hall of the core, mesh, files, tracing, layers, weights.
"""
