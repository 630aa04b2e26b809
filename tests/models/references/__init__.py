"""Decoders whose classes transformers no longer has, in plain torch.

Each is written from its publisher's description, holds its publisher's ``config.json`` values and tensor names, and
recomputes everything for each token: no cache, no kernel, nothing shared with what it is compared with.
"""
