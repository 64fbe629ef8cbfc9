"""Stages on a run directory, and the runs that are kept, for the commands.

Not here: flags (asked) and a command of its own (commands).
May import: shown, asked, and the packages below the command line.
"""
