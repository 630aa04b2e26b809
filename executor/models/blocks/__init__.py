"""Blocks of a layer: one file per kind of mixer or feed-forward. A block declares its tensors in its constructor."""
