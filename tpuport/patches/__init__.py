"""Patches that serve more than one model."""
