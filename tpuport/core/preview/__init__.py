"""Frames while steps run: from latents to what is decoded, and on to colours.

Not here: terminals and files (cli). May import: all rooms up to drive.
"""
