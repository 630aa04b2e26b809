"""CUDA operations: one module each, with argument checks, the launch and the torch reference.

Each takes a `Device` first, never waits for it, and may be captured in a graph.
"""
