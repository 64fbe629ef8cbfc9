"""One file per command: its flags, and the calls that do it.

Not here: what several commands share (runs, asked, shown).
May import: every room of the command line, and the packages below it.
"""
