"""CUDA kernels: compilation, modules, launch arguments."""
