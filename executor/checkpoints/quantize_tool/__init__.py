"""Checkpoints of fewer bits out of plain ones: which tensors are linear layers, how they are rounded, how they are written."""
