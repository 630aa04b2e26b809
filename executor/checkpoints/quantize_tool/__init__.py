"""Quantize plain checkpoints: detection of linear layers, rounding, writing."""
