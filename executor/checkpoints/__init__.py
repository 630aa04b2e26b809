"""Checkpoints: weight files, quantization formats, GGUF, and the tool that writes quantized checkpoints."""
