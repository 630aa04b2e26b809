"""CPU operations of a model: a torch reference of each, and bindings of the host kernels."""
