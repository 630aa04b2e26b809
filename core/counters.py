"""Counters of the core, kept across executor restarts. `quintet.core.metrics` exports them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from quintet.wire.config import MAX_DRAFTS
from quintet.wire.kv_tiers import TierName


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
    transfers: Counter[tuple[TierName, str]] = field(default_factory=Counter)
    """Objects, blocks and bytes of KV back ends, by name (`quintet.core.kv_services.kv_tier_client`)."""
    executor_losses: int = 0
    poison_requests: int = 0
    poison_rejections: int = 0
    num_drafts: int = 0
    """Rows that verified drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Draft tokens that were part of the output."""
    num_accepted_tokens_per_pos: list[int] = field(default_factory=lambda: [0] * MAX_DRAFTS)
    """These by their place among the drafts of the step."""
    steps: int = 0
    expired: int = 0
    """Choices that passed their deadline before they ended."""
    deadline_rejections: int = 0
    """Requests rejected because they were predicted to miss their deadline."""
