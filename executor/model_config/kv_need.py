"""What attention keeps of every token, as numbers that memory is counted by. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KvNeed:
    """What one layer keeps of every token."""

    num_kv_heads: int
    key_dim: int
    """Numbers of a key of one head."""
    value_dim: int
    window: int | None = None
    """Of how many tokens, the newest; None for all."""
    chunk: int | None = None
    """Of those of the newest chunk of so many positions; None for all."""
    values_in_keys: bool = False
    """Whether a value is what its key begins with: it need not be kept by itself."""
