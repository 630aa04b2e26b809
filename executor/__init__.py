"""The executor process: weights, model, KV memory and sampling.

It turns each `StepPlan` into a `StepResult` and decides nothing: which rows run, with which blocks, is the core's
choice. It knows no request beyond its slot, no text and no scheduling. Importing this package imports no torch: the
mock worker and the main loop live without it.
"""
