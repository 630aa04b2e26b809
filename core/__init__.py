"""The core process: decides, step by step, which tokens of which request are computed next, and where their KV lives.

Integers in, integers out. Only `main` knows of sockets and clocks; nothing here knows of tensors or text.
"""
