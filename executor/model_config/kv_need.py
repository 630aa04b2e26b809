"""KV memory of one layer per token. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvNeed:
    """KV memory that one layer keeps per token."""

    num_kv_heads: int
    key_dim: int
    """Elements of one head's key."""
    value_dim: int
    window: int | None = None
    """Number of recent tokens kept; None for all."""
    chunk: int | None = None
    """Chunk length in positions: only the current chunk's tokens are kept; None for all."""
    values_in_keys: bool = False
    """True if a value is a prefix of its key and needs no memory."""
