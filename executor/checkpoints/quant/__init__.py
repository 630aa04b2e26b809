"""Quantization: selects the number format of each linear layer's weight while a model is built.

A method object owns one layer's tensors. Third parties add a row to `quintet.executor.checkpoints.quant.registry`.
"""
