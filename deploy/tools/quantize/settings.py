"""Constants of `quintet quantize`."""

WINDOW = 512
"""Maximum window length in tokens; windows of a text are independent of each other."""
MAX_CALIBRATION_TOKENS = 1 << 15
"""Limit of calibration tokens; the inputs of one layer for all of them are in memory at once."""
