"""The contract between Quintet's processes: every message, parameter, limit and socket they share.

This is the only code that more than one kind of process imports. It knows nothing of HTTP, text, schedulers
or tensors; it imports the standard library, msgspec, pyzmq and (for process titles) setproctitle.
"""
