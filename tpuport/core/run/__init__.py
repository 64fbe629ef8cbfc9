"""What people see of a run: progress, memory, profiles.

Not here: the run itself (seam, drive) and what a command prints at its end (cli).
May import: the hall of the core and every room up to drive.
"""
