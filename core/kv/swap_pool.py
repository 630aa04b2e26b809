"""Host memory back end (swap space), core half: blocks of preempted requests, kept until these are resumed.

Its transfers are columns of plans instead of messages, so no request waits for them. A block outside the prefix cache is
copied to the host by the next plan, a cached one when it is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from quintet.core.kv.prefetch import FetchRequest
from quintet.core.kv.tier import Tier


class SwapPool(Tier):
    """Contents that preempted requests want."""

    name = "host"
    is_local = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.host_blocks = self.fetches.host_blocks
        self.held = self.host_blocks.block_of

    def save(self, request_id: int, keys: Sequence[bytes], num_tokens: int) -> Sequence[bytes]:
        """See `Tier.save`. With one plain group as many as there are free host blocks, otherwise all or none."""
        is_plain = self.groups.is_plain
        saved = self.host_blocks.want(request_id, keys, whole=not is_plain)
        if saved:
            num_saved = len(saved) * self.groups.spec.block_size if is_plain else num_tokens
            self.fetches.requests[request_id] = FetchRequest(num_saved)
        return saved

    def on_evict(self, key: bytes, block: int) -> None:
        self.host_blocks.on_evict(key, block)

    def take_copies(self) -> list[int]:
        return self.host_blocks.take_copies()
