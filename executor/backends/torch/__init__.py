"""Torch backend: models run operation by operation, and models of transformers."""
