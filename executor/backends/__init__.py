"""Backends that run a model: the compiled CPU program, CUDA, torch; and the platforms they run on."""
