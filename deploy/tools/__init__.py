"""Offline tools: quantization, load generation, replay, step and KV memory analysis."""
