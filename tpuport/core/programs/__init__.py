"""Compiled programs: made, kept, found again.

Not here: when a program is called (run) and what it costs (cost).
May import: the hall of the core and every room up to spec.
"""
