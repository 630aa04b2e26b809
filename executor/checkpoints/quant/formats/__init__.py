"""Formats of quantized checkpoints, one file each: recognised configurations, tensors of a linear layer, meaning of
their bits. `registry` has those without tensors of linear layers.

Imports no torch: `deploy` recognises a format before anything is started.
"""
