"""Vectors of a step's tokens that a plan brings in place of ids: where they go among the rows that the embedding made.

Knows nothing of how a model computes. Whoever runs one puts them there before anything else is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.batch import Rows
from quintet.executor.memory import to_device
from quintet.wire.embeds import RowEmbeds

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StepEmbeds:
    """Vectors of some of a step's tokens."""

    tokens: torch.Tensor
    """int64[K]: which of the step's tokens."""
    vectors: torch.Tensor
    """``[K, width]`` in the model's dtype."""

    def put(self, embedded: torch.Tensor) -> None:
        """Write them, in place, into what the embedding made of ids: ``[num_tokens or more, width]``."""
        embedded.index_copy_(0, self.tokens, self.vectors)


def embeds_of(rows: Rows, dtype: torch.dtype, device: torch.device) -> StepEmbeds | None:
    """Return the vectors of the rows' tokens; None where all have ids.

    Of a plan that is computed in parts, each part's rows take what is theirs.
    """
    if not rows.plan.embeds:
        return None
    at = {slot: row for row, slot in enumerate(rows.slots.tolist())}
    tokens, vectors = [], []
    for given in rows.plan.embeds:
        row = at.get(given.slot)
        if row is None:
            continue
        start, offset = int(rows.starts[row]), int(rows.offsets[row])
        begin = max(start, given.start)
        end = min(start + int(rows.counts[row]), given.start + given.num_tokens)
        if begin < end:
            tokens.append(np.arange(begin, end) - start + offset)
            vectors.append(_numbers(given, dtype)[begin - given.start : end - given.start])
    if not tokens:
        return None
    return StepEmbeds(to_device(np.concatenate(tokens), device), torch.cat(vectors).to(device))


def _numbers(given: RowEmbeds, dtype: torch.dtype) -> torch.Tensor:
    """Return the vectors; numbers beyond the largest of the model's dtype become that, not infinite."""
    numbers = torch.frombuffer(bytearray(given.values), dtype=DTYPES[given.dtype]).view(-1, given.width)
    most = torch.finfo(dtype).max
    return numbers.to(dtype) if numbers.dtype is dtype else numbers.clamp(-most, most).to(dtype)
