"""Table of the packed columns of all messages, for tools that show or change them."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from quintet.wire import kv_tiers as k
from quintet.wire import messages as m
from quintet.wire import step as s
from quintet.wire.request import RequestSpec

COLUMNS: Mapping[type[msgspec.Struct], Mapping[str, str]] = {
    m.TokenPrompt: {"token_ids": "i"},
    RequestSpec: {"output_ids": "i"},
    m.Admit: {"prompt_ids": "i"},
    m.Live: {"request_ids": "q"},
    m.InFlightReport: {"request_ids": "q", "attempts": "i"},
    m.Unknown: {"request_ids": "q"},
    m.Open: {"prompt_ids": "i", "output_ids": "i"},
    m.Tokens: {
        "request_ids": "q",
        "first_indexes": "i",
        "num_tokens": "B",
        "token_ids": "i",
        "finishes": "B",
        "named_stops": "i",
        "closed": "q",
    },
    m.StopHit: {"request_ids": "q", "attempts": "i"},
    m.Started: {"prompt_ids": "i"},
    m.Text: {"token_ids": "i"},
    m.Tokenized: {"token_ids": "i"},
    m.DetokenizeQuery: {"token_ids": "i"},
    s.NewRow: {"token_ids": "i"},
    s.StepPlan: {
        "freed": "i",
        "blocks": "i",
        "copies": "i",
        "slots": "i",
        "starts": "i",
        "counts": "i",
        "samples": "B",
        "drafts": "B",
        "swaps_out": "i",
        "swaps_in": "i",
    },
    s.TokenLogprobs: {"token_ids": "i", "logprobs": "f"},
    s.PromptLogprobs: {"ranks": "i", "token_ids": "i", "logprobs": "f"},
    s.StepResult: {"token_ids": "i", "num_tokens": "B", "num_drafts": "B", "failed": "i"},
    k.Store: {"blocks": "i", "places": "i"},
    k.Fetch: {"positions": "i", "host_blocks": "i"},
    k.SearchResult: {"counts": "i"},
    k.KvTierRequests: {"drops": "i"},
    k.KvTierResults: {"fetched": "i", "missed": "i"},
    k.StoredBlocks: {"places": "i"},
}
"""Struct, field, and the `array` type code of its numbers."""
