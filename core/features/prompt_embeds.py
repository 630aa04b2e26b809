"""Prompt embeddings: send the embeddings of the prompt tokens that a step computes."""

from __future__ import annotations

from quintet.core.hooks import Feature, Setup
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState
from quintet.core.step_builder import StepBuilder
from quintet.wire.embeds import RowEmbeds


def build(setup: Setup) -> Feature | None:
    """Return the feature; it is always on and only affects requests with an embeddings prompt."""
    return Feature("prompt_embeds", claim=claim, attach=attach)


def claim(state: SchedulerState, request: Request) -> bool:
    """Return True for an embeddings prompt."""
    return request.embeds is not None


def attach(state: SchedulerState, step: StepBuilder) -> None:
    """Attach the embeddings that rows compute instead of tokens."""
    found = []
    for request, start, count in zip(step.rows, step.starts, step.counts, strict=True):
        embeds, end = request.embeds, min(start + count, request.num_prompt)
        if embeds is not None and start < end:
            size = embeds.row_bytes
            values = embeds.values[start * size : end * size]
            found.append(RowEmbeds(request.slot, start, embeds.dtype, embeds.width, values))
    step.columns["embeds"] = found
