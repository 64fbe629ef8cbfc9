"""A run rehearsed for chips that are not there: memory, time, programs for a folder.

Not here: the rehearsal itself (drive) and reading a program's text (cost).
May import: every room of the core.
"""
