"""What all of `quintet quantize` goes by."""

WINDOW = 512
"""Tokens of a text that are read at a time, of shorter models fewer: what is before a window its tokens do not see."""
MAX_CALIBRATION_TOKENS = 1 << 15
"""Of these one layer's inputs are in memory at once."""
