"""Features that the installed transformers computes correctly, so that it can be the reference.

Wrong in 5.17 and correct in 5.23: gpt-oss used 7.0 for every ``swiglu_limit``, and Mamba 2 normed all groups as one. With
an old version, rows use values at which both agree.
"""

from __future__ import annotations

import transformers

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
READS_SWIGLU_LIMIT = NORMS_MAMBA2_BY_GROUP = VERSION >= (5, 23)

SWIGLU_LIMIT = 1.5 if READS_SWIGLU_LIMIT else 7.0
MAMBA2_GROUPS = 2 if NORMS_MAMBA2_BY_GROUP else 1
