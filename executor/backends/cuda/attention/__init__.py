"""Attention backends for steps with prompts: our kernels, torch or FlashInfer. Decode steps always use our kernels.

`choice` selects one at startup. All backends read the same paged cache and the same `StepRows`.
"""
