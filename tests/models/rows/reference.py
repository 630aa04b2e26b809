"""What the installed transformers computes rightly, so that it can be the reference.

Seen wrong in 5.17 and right in 5.23: gpt-oss took 7.0 for whatever ``swiglu_limit`` its configuration has, and Mamba 2 normed all
groups as one. Rows use values at which old and new versions agree where the version is old.
"""

from __future__ import annotations

import transformers

VERSION = tuple(int(part) for part in transformers.__version__.split(".")[:2])
READS_SWIGLU_LIMIT = NORMS_MAMBA2_BY_GROUP = VERSION >= (5, 23)

SWIGLU_LIMIT = 1.5 if READS_SWIGLU_LIMIT else 7.0
MAMBA2_GROUPS = 2 if NORMS_MAMBA2_BY_GROUP else 1
