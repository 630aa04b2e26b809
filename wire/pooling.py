"""Pooling: the result of a request is one vector of its prompt's hidden states, without output tokens.

    core ── StepPlan.pooled_rows ──▶ executor ── StepResult.vectors ──▶ core ── Pooled ──▶ frontend

The vector goes from the core to the frontend directly: the detokenizer has no part in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import msgspec

from quintet.wire.ids import Count, Id

ITEM_BYTES = 4
"""Bytes of a component (float32)."""


class PoolingType(IntEnum):
    """The hidden states of a prompt that are pooled."""

    LAST = 0
    """That of the last token."""
    MEAN = 1
    """The mean of all."""


class PoolingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Pooling of the served model."""

    kind: PoolingType
    width: int
    """Components of a vector: the model's hidden size."""
    normalize: bool = True
    """Divide a vector by its Euclidean norm, unless the request decides otherwise."""


class PooledRow(msgspec.Struct, array_like=True, gc=False):
    """Inside `StepPlan`: a row of a pooling request. It draws no token."""

    row: int
    """Index among the rows of the plan."""
    kind: PoolingType
    num_prompt_tokens: int
    """The row that ends there has a vector in the result."""


class RowVector(msgspec.Struct, array_like=True, gc=False):
    """Inside `StepResult`: the pooled vector of a row."""

    row: int
    vector: bytes
    """float32[width], not normalized"""


class Pooled(msgspec.Struct, array_like=True, tag="pooled", gc=False):
    """Core -> frontend: the result of a pooling request, which has ended."""

    request_id: Id
    num_prompt_tokens: Count
    num_cached_tokens: Count
    scheduled_ns: int
    """Time at which its first step was planned."""
    vector: bytes
    """float32[width], not normalized"""


def are_pooled(rows: Sequence[PooledRow], samples: bytes) -> bool:
    """Return True when these are rows of a plan that draw no token."""
    return all(0 <= each.row < len(samples) and not samples[each.row] for each in rows)


def are_vectors(vectors: Sequence[RowVector], num_rows: int, num_bytes: int) -> bool:
    """Return True when each vector has ``num_bytes`` and belongs to one of ``num_rows`` rows."""
    return all(0 <= each.row < num_rows and len(each.vector) == num_bytes for each in vectors)
