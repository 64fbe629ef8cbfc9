"""A server: requests, jobs, processes beside it, HTTP; its page and its client.

Not here: how a video is made (runs), nor the flags of the command (commands).
May import: shown, asked, batches, in a function runs, and the packages below the
command line.
"""
