"""Memory that was needed for a moment: the C library keeps what is freed, unless it is asked to give it back.

Says from which size on that is worth asking for; when, those know who need so much: the tokenizer's lanes for long prompts, the
frontend for large bodies and answers.
"""

from __future__ import annotations

import ctypes

LEFTOVER_BYTES = 1 << 20
"""Prompts, bodies and answers from this size on are worth it: what is made of them on the way is many times as large."""


def give_back_memory() -> None:
    """Give the system the memory back that was needed for a moment only, where the C library can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
