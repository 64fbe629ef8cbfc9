"""One run of the stages, from a request to frames.

Not here: compiling (programs) and runs that are only planned (plan).
May import: the hall of the core and every room up to programs.
"""
