"""What `quintet quantize` does, but for the numbers: these are the executor's."""
