"""One run: planned, checked, made, kept. Most modules import torch and jax at the top.

Not here: flags (asked) and a command of its own (commands).
May import: shown, asked, and the packages below the command line.
"""
