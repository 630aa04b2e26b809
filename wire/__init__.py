"""The contract between Quintet's processes: every message, parameter, limit and figure they share.

It knows nothing of sockets, HTTP, text, schedulers or tensors; it imports the standard library and msgspec. What moves
the messages is `quintet.process`.
"""
