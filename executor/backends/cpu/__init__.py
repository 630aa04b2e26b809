"""CPU backend: a compiled step over the host kernels of csrc/cpu."""
