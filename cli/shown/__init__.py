"""What a person or a program reads: errors, progress, results.

Not here: flags (asked).
May import: the packages below the command line.
"""
