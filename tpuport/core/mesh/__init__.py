"""Chips, slices, the mesh over them, and how a picture is divided among them.

Not here: what is placed on a mesh (weights), or what runs on one (programs).
May import: the hall of the core.
"""
