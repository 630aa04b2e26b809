"""The executor process: weights, model, KV memory and sampling.

The executor turns each `StepPlan` into a `StepResult`. The core schedules: it chooses the rows of a step and their
blocks. The executor knows a request only by its slot and handles no text. Importing this package imports no torch:
the main loop and the mock worker run without it.
"""
