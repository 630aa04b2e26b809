"""Sampling: from logits to tokens for the whole batch, one file per feature.

The order of operations is vLLM's, so the same parameters behave the same::

    raw logits ── log-probabilities are of these
      │ allowed ids, bad words, min tokens, logit bias, penalties      (SHAPING in `sampler`: rows that use one, fp32)
      ├─ temperature 0: the most likely token
      └─ temperature, min-p, top-k, top-p, draw                        (`draw`: one operation, see FILTERS there)

To add a feature of the first kind, add a file here and an entry in ``SHAPING``. To add a filter, add a field in
`settings`, a function in ``FILTERS`` (the reference), and the same filter in ``csrc/cpu/kernels/sampling.cpp``.
"""
