"""Pooling of hidden states after the final norm, for the rows of pooling requests.

A mean is a sum in float64 over the tokens in order, so its bits do not depend on the chunks of a prompt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.ragged import Int, ranges
from quintet.executor.slots import Rows
from quintet.wire.pooling import PoolingType, RowVector

Floats = NDArray[np.float32]


class HiddenSource(Protocol):
    """A runner's last step, as a source of hidden states."""

    @property
    def max_outputs(self) -> int:
        """Maximum number of tokens per `normed` call."""

    def normed(self, tokens: Int) -> torch.Tensor:
        """Return ``[len(tokens), hidden]`` after the final norm, of tokens of the last step by index.

        The next call overwrites the tensor.
        """


@dataclass(frozen=True, slots=True)
class _Sum:
    """Sum over the first ``end`` tokens of a prompt, and over those before its newest chunk, which may be computed again."""

    start: int
    before: NDArray[np.float64]
    end: int
    after: NDArray[np.float64]


class Pooler:
    """Pools steps, with the sums of prompts that are computed in several ones, by slot."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}

    def pool(self, rows: Rows, source: HiddenSource) -> list[RowVector]:
        """Return the vectors of the rows that end their prompts. Call it after each computed step, or part of one."""
        starts, counts = rows.starts, rows.counts
        positions = starts + counts
        pooled = [
            each
            for each in rows.plan.pooled_rows
            if each.kind is PoolingType.MEAN or positions[each.row] == each.num_prompt_tokens
        ]
        at = np.array([each.row for each in pooled], np.int64)
        lengths = np.where([each.kind is PoolingType.MEAN for each in pooled], counts[at], 1)
        hidden = _hidden_of(ranges((rows.offsets + counts)[at] - lengths, lengths)[1], source)
        found: list[RowVector] = []
        for each, end, length in zip(pooled, np.cumsum(lengths).tolist(), lengths.tolist(), strict=True):
            vector: Floats | None = hidden[end - 1]
            if each.kind is PoolingType.MEAN:
                slot, start = int(rows.slots[each.row]), int(starts[each.row])
                vector = self._mean(slot, start, hidden[end - length : end], each.num_prompt_tokens)
            if vector is not None:
                found.append(RowVector(each.row, vector.tobytes()))
        return found

    def _mean(self, slot: int, start: int, hidden: Floats, num_tokens: int) -> Floats | None:
        """Add a chunk that begins at ``start``; return the mean over all ``num_tokens`` tokens after the last chunk."""
        known = self._sums.get(slot)
        before = np.zeros(hidden.shape[1])
        if start:
            assert known is not None and start in (known.start, known.end), (slot, start, known)
            before = known.before if start == known.start else known.after
        after: NDArray[np.float64] = np.add.reduce(np.concatenate((before[None], hidden)), axis=0)
        end = start + len(hidden)
        self._sums[slot] = _Sum(start, before, end, after)
        if end < num_tokens:
            return None
        mean: Floats = (after / num_tokens).astype(np.float32)
        return mean


def _hidden_of(tokens: Int, source: HiddenSource) -> Floats:
    """Return float32 ``[len(tokens), hidden]``."""
    most = source.max_outputs
    parts = [
        source.normed(tokens[begin : begin + most]).float().cpu().numpy().copy()
        for begin in range(0, len(tokens), most)
    ]
    return np.concatenate(parts) if parts else np.empty((0, 0), np.float32)
