"""Modules split in space at the seam: upstream's forward on each device's part.

Which dims are rows and columns is followed through the traced program, and what is not
local in a picture is refused by name.
"""
