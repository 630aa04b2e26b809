"""Layers: the parts of a model with weights or tables."""
