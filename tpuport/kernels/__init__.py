"""Attention in JAX: no torch, no model names."""
