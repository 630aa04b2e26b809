"""Torch backend: eager execution of models, and the fallback to models of transformers."""
