"""What a model's layers need of KV memory, as plain numbers the core can count with."""

from __future__ import annotations

import msgspec


class KvSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """KV needs of a group of layers that share one block table.

    A block holds ``block_size`` tokens of every layer of the group.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    block_size: int
    scale_bytes: int = 0
    """What each token's key, and its value, of each head takes besides its numbers: an int8 cache's scale."""

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers of the group."""
        head_bytes = self.head_dim * self.dtype_bytes + self.scale_bytes
        return 2 * self.num_layers * self.num_kv_heads * head_bytes

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block in all layers of the group."""
        return self.bytes_per_token * self.block_size

    def num_blocks(self, memory_bytes: int) -> int:
        """How many blocks fit into this much memory."""
        return memory_bytes // self.bytes_per_block
