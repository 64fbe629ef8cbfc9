"""Upstream's pipeline drives; the calls of its modules run as compiled programs.

Not here: a whole call of the pipeline (drive).
May import: the hall of the core and every room up to pipelines.
"""
