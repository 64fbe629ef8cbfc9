"""Compiled programs: keyed, kept in a folder, found again; torch operators of a trace.

Not here: when a program is called (seam) and what it costs (cost).
May import: the hall of the core and every room up to spec.
"""
