"""A run rehearsed for chips that are not there: memory, time, meshes that fit.

Not here: reading a program's text (cost).
May import: every room of the core.
"""
