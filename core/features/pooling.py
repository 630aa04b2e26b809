"""Pooling: rows of requests that need hidden states instead of a token.

A pooling request counts one output token (`quintet.core.requests.admission.length_limit`), which its last row would draw. That
row returns a vector instead, and the request ends with it.
"""

from __future__ import annotations

from quintet.core.hooks import Feature, Setup
from quintet.core.requests.request import Request
from quintet.core.scheduler_state import InFlightPlan, SchedulerState
from quintet.core.step_builder import StepBuilder
from quintet.core.token_messages import TokensBuilders
from quintet.wire.pooling import Pooled, PooledRow, PoolingType
from quintet.wire.step import StepResult


def build(setup: Setup) -> Feature | None:
    return Feature("pooling", claim=claim, attach=attach) if setup.pooling else None


def claim(state: SchedulerState, request: Request) -> bool:
    """Return True for a pooling request."""
    return request.spec.pooling is not None


def attach(state: SchedulerState, step: StepBuilder) -> None:
    """Attach the rows with hidden states that are pooled: the last one of a prompt, or all."""
    pooled = []
    for row, request in enumerate(step.rows):
        kind = request.spec.pooling
        if kind is None or (kind is PoolingType.LAST and not step.samples[row]):
            continue
        step.samples[row], request.length = 0, request.num_prompt
        pooled.append(PooledRow(row, kind, request.num_prompt))
    step.columns["pooled_rows"] = pooled


def end_pooled(
    flight: InFlightPlan, result: StepResult, outbox: TokensBuilders, ended: list[Request], now_ns: int
) -> None:
    """Report the vectors of a step, and append their requests to ``ended``."""
    for found in result.vectors:
        request = flight.rows[found.row]
        if request.generation != flight.generations[found.row]:
            continue
        stats = request.stats
        scheduled_ns = now_ns if stats.scheduled_ns is None else stats.scheduled_ns
        outbox.pooled.append(
            Pooled(request.request_id, request.num_prompt, stats.num_cached, scheduled_ns, found.vector)
        )
        ended.append(request)
