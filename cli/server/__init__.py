"""What ``tpuport serve`` is made of: requests, jobs, processes beside it, and HTTP.

Not here: how a video is made (``cli/runs``), and the flags of the command.
"""
