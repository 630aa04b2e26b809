"""Input embeddings of a step: vectors that a plan provides instead of token ids.

The runner writes them over the rows of the embedding layer's output before the first layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quintet.executor.memory import to_device
from quintet.executor.slots import Rows
from quintet.wire.embeds import EmbedsSpan

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StepEmbeds:
    """Input embeddings of some of a step's tokens."""

    tokens: torch.Tensor
    """int64[K]: index of each token in the step."""
    vectors: torch.Tensor
    """``[K, width]`` in the model's dtype."""

    def put(self, embedded: torch.Tensor) -> None:
        """Write the vectors into the embedding layer's output, in place: ``[num_tokens or more, width]``."""
        embedded.index_copy_(0, self.tokens, self.vectors)


def embeds_of(rows: Rows, dtype: torch.dtype, device: torch.device) -> StepEmbeds | None:
    """Return the input embeddings of the rows' tokens; None if all tokens have ids.

    In a split step, each part takes the vectors of its own rows.
    """
    if not rows.plan.embeds:
        return None
    at = {slot: row for row, slot in enumerate(rows.slots.tolist())}
    tokens, vectors = [], []
    for given in rows.plan.embeds:
        row = at.get(given.slot)
        if row is None:
            continue
        span, start, offset = given.span, int(rows.starts[row]), int(rows.offsets[row])
        begin, end = max(start, span.start), min(start + int(rows.counts[row]), span.end)
        if begin < end:
            tokens.append(np.arange(begin, end) - start + offset)
            vectors.append(_numbers(span, dtype)[begin - span.start : end - span.start])
    if not tokens:
        return None
    return StepEmbeds(to_device(np.concatenate(tokens), device), torch.cat(vectors).to(device))


def _numbers(span: EmbedsSpan, dtype: torch.dtype) -> torch.Tensor:
    """Return the vectors in ``dtype``, clamped to its finite range."""
    numbers = torch.frombuffer(bytearray(span.values), dtype=DTYPES[span.dtype]).view(-1, span.width)
    most = torch.finfo(dtype).max
    return numbers.to(dtype) if numbers.dtype is dtype else numbers.clamp(-most, most).to(dtype)
