"""Counters of the core, kept across executor restarts. `quintet.core.metrics` exports them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Totals since the process started."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    computed_tokens: int = 0
    """Tokens computed by steps, for requests that still had their slot at commit."""
    generation_tokens: int = 0
    first_tokens: int = 0
    """Generated tokens that are the first of a choice, drawn by the step of its last prompt token."""
    swap_out_blocks: int = 0
    """Blocks copied to the host."""
    swap_in_blocks: int = 0
    swap_out_bytes: int = 0
    swap_in_bytes: int = 0
    disk_stored_blocks: int = 0
    disk_unstored_blocks: int = 0
    """Blocks that could not be stored."""
    disk_fetched_blocks: int = 0
    disk_missed_blocks: int = 0
    """Blocks that were absent or damaged on disk."""
    disk_stored_bytes: int = 0
    disk_fetched_bytes: int = 0
    peer_offered_blocks: int = 0
    """Blocks copied from the device for other servers."""
    peer_fetched_blocks: int = 0
    peer_missed_blocks: int = 0
    """Blocks that another server did not deliver or delivered damaged."""
    peer_fetched_bytes: int = 0
    store_kept_runs: int = 0
    store_unkept_runs: int = 0
    """Chunks that could not be stored in the shared store."""
    store_fetched_blocks: int = 0
    store_missed_blocks: int = 0
    """Blocks that the store did not deliver or delivered damaged."""
    store_fetched_bytes: int = 0
    executor_losses: int = 0
    poison_requests: int = 0
    poison_rejections: int = 0
    num_drafts: int = 0
    """Rows that verified drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that were part of the output."""
    steps: int = 0
    expired: int = 0
    """Choices that passed their deadline before they ended."""
    deadline_rejections: int = 0
    """Requests rejected because they were predicted to miss their deadline."""
