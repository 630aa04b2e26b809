"""Sublayers of a decoder layer: one file per kind of mixer or feed-forward. A sublayer declares its tensors when constructed."""
