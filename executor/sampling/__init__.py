"""From logits to tokens, the whole batch at once, one file per concern.

The order is vLLM's, so that scripts tuned there behave alike::

    raw logits ── log-probabilities are of these
      │ allowed ids, bad words, min tokens, logit bias, penalties      (SHAPING in `sampler`: rows that want one, as fp32)
      ├─ temperature 0: the most likely
      └─ temperature, min-p, top-k, top-p, draw                        (`draw`: one operation, see FILTERS there)
"""
