"""Many requests: read, packed, given to replicas, and noted where their videos are.

Not here: how a video is made (runs).
May import: shown, asked, in a function runs, and the packages below the command line.
"""
