"""What a model's ``config.json`` says, checked value by value, and what that makes of the model. Imports no torch: the supervisor
resolves a configuration with the very functions that the executor builds the model with.
"""
