"""Quantization: which number format each linear layer's weight gets, decided while a model is built, unknown to the model.

A method object owns one layer's tensors. Third parties add theirs as a row of `quintet.executor.checkpoints.quant.registry`.
"""
