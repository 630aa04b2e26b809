"""Core process: scheduling of tokens and placement of KV blocks.

It takes and returns integers. Only `main` uses sockets and clocks; no module here handles tensors or text.
"""
