"""Stages on a run directory, for the commands that run them.

Not here: flags (asked) and a command of its own (commands).
May import: shown, asked, and the packages below the command line.
"""
