"""Times of CPU kernels compared with the machine's limits."""
