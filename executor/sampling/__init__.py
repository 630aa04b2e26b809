"""From logits to tokens, the whole batch at once, one file per concern.

The order is vLLM's, so that scripts tuned there behave alike::

    raw logits ── log-probabilities are of these
      │ allowed ids, bad words, min tokens, logit bias, penalties      (SHAPING in `sampler`: rows that want one, as fp32)
      ├─ temperature 0: the most likely
      └─ temperature, min-p, top-k, top-p, draw                        (`draw`: one operation, see FILTERS there)

A concern of the first kind is a file here and a place in ``SHAPING``. One of the second kind is a number in `settings`, a
function and its place in ``FILTERS``, which is the reference, and the same in ``csrc/cpu/kernels/sampling.cpp``.
"""
