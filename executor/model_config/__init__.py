"""Parse a model's ``config.json``, checked value by value, into a `ModelSpec`.

Imports no torch: the supervisor resolves a configuration with the same functions that the executor builds the model
with.
"""
