"""Formats of quantized checkpoints: a file for each says which configurations it knows, which tensors a linear layer has in it,
and what their bits mean. Imports no torch: `deploy` recognises a format before anything is started.
"""
