"""Return of freed memory to the system: glibc keeps it unless asked.

It defines the size from which this is worthwhile. Callers decide when: the tokenizer after long prompts, the frontend
after large bodies and answers.
"""

from __future__ import annotations

import ctypes

TRIM_MIN_BYTES = 1 << 20
"""Minimum size of a prompt, body or answer: processing it takes many times as much memory."""


def trim_memory() -> None:
    """Return freed memory to the system (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
