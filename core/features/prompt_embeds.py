"""Prompt embeddings: send the embeddings of the prompt tokens that a step computes."""

from __future__ import annotations

from quintet.core.hooks import Feature, Setup
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import SchedulerState
from quintet.core.step_builder import StepBuilder
from quintet.wire.embeds import RowEmbeds


def build(setup: Setup) -> Feature | None:
    return Feature("prompt_embeds", claim=claim, attach=attach) if setup.prompt_embeds else None


def claim(state: SchedulerState, request: Request) -> bool:
    """Return True for a prompt with embeddings."""
    return bool(request.embeds)


def attach(state: SchedulerState, step: StepBuilder) -> None:
    """Attach the embeddings that rows compute instead of tokens."""
    found = []
    for request, start, count in zip(step.rows, step.starts, step.counts, strict=True):
        for span in request.embeds:
            begin, end = max(start, span.start), min(start + count, span.end)
            if begin < end:
                found.append(RowEmbeds(request.slot, span.piece(begin, end)))
    step.columns["embeds"] = found
