"""Weights: what a checkpoint must hold (`plan`), and reading it (`load`)."""
