"""CUDA backend: our kernels, launched on torch's stream or captured in graphs.

`device` defines the interface of a device. The other modules use only that interface, so tests run them without a GPU
(tests/cuda). No other package depends on CUDA.
"""
