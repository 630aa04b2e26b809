"""What a core counts, whatever becomes of its executors; `quintet.core.metrics` tells it by the names operators know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What happened since the process started."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    computed_tokens: int = 0
    """By steps, for requests that had their slot when the result came."""
    generation_tokens: int = 0
    first_tokens: int = 0
    """Of these, a choice's first: a prompt's last token was computed for it."""
    swap_out_blocks: int = 0
    """Blocks that plans copy to the host."""
    swap_in_blocks: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    disk_stored_blocks: int = 0
    disk_unstored_blocks: int = 0
    """Blocks that should have been stored, and were not."""
    disk_fetched_blocks: int = 0
    disk_missed_blocks: int = 0
    """Blocks that should have been on disk, and were not, or not whole."""
    disk_stored_bytes: int = 0
    disk_fetched_bytes: int = 0
    peer_offered_blocks: int = 0
    """Blocks copied out of the device for other servers."""
    peer_fetched_blocks: int = 0
    peer_missed_blocks: int = 0
    """Blocks that another server should have had, and that did not come, or not whole."""
    peer_fetched_bytes: int = 0
    store_kept_runs: int = 0
    store_unkept_runs: int = 0
    """Runs of blocks that should have been kept in the shared store, and were not."""
    store_fetched_blocks: int = 0
    store_missed_blocks: int = 0
    """Blocks that the store should have had, and that did not come, or not whole."""
    store_fetched_bytes: int = 0
    executor_losses: int = 0
    convictions: int = 0
    refusals: int = 0
    steps: int = 0
    expired: int = 0
    """Choices whose deadline passed before they ended."""
    hopeless: int = 0
    """Requests that were refused because it would."""
