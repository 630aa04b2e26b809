"""Decoders that transformers no longer has, in plain torch.

Each follows its publisher's description, ``config.json`` values and tensor names. It recomputes everything for each token:
no cache, no kernel, and no code shared with the tested one.
"""
