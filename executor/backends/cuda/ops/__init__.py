"""The operations on a CUDA device: one file each, with host checks, the launch and the torch reference.

They take a `Device` first, allocate nothing that a captured graph could not replay, and never wait for the device.
"""
