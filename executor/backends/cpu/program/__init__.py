"""The compiled step on a CPU: a model's forward pass recorded once, run with one call into C++ per step."""
