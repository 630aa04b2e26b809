"""The operations a model is made of: a torch reference each, with signature and shapes, and the host kernels' functions."""
