"""Whose kernels compute the attention of prompts: ours, torch's or FlashInfer's. Decode steps are always ours.

`choice` decides at boot; each backend is a file. All read the same paged cache and the same `StepRows`.
"""
