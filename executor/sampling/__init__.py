"""Sampling: from logits to tokens for the whole batch.

The order of operations is vLLM's, so the same parameters behave the same::

    raw logits ── log-probabilities are of these
      │ allowed ids, bad words, min tokens, logit bias, penalties      (SHAPING in `sampler`: rows that use one, fp32)
      ├─ temperature 0: the most likely token
      └─ temperature, min-p, top-k, top-p, draw                        (`draw`: one operation; FILTERS in `settings`)

``docs/developers/extending.md`` has the steps to add either kind.
"""
