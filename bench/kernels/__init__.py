"""Host kernels against the machine's limits."""
