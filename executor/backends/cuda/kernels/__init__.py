"""CUDA kernels: compilation and modules."""
