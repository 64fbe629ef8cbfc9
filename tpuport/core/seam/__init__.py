"""Upstream's pipeline drives; the calls of its modules run as compiled programs.

Not here: stages that a model declares (run).
May import: the hall of the core and every room up to programs.
"""
