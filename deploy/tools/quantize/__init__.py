"""Implementation of `quintet quantize`, except the numerics, which are in the executor."""
