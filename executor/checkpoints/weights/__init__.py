"""Weights: the tensors that a model expects of a checkpoint (`plan`), and loading them (`load`)."""
