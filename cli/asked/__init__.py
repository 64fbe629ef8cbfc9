"""From flags, files and the environment to settings, and their checks.

Not here: running anything (runs) and printing (shown).
May import: shown, and the packages below the command line.
"""
