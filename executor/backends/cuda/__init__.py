"""The executor on NVIDIA GPUs: kernels of ours, launched on torch's stream, captured in graphs.

`device` says what a device can do; everything else here is written against that, so that its logic is tested where
there is no GPU (tests/cuda). Nothing outside this package knows of CUDA.
"""
