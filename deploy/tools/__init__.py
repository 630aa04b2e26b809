"""Tools beside the server: quantization, load generation, replay, accounting of steps and memory."""
