"""What there is to report about a row of logits: one token's log-probability and rank, and the most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.memory import to_device
from quintet.executor.ragged import Int


@dataclass(frozen=True, slots=True)
class LogprobEntries:
    """Of n rows, on the host."""

    ids: NDArray[np.int32]
    """``[n, 1 + num_top]``: the token asked about first, then the most likely ones."""
    values: NDArray[np.float32]
    """Their log-probabilities."""
    ranks: NDArray[np.int32]
    """``[n]``: 1 plus the number of tokens more likely than the one asked about."""
    normalizers: NDArray[np.float64]
    """``[n]``: a logit less this is its log-probability."""


def entries(logits: torch.Tensor, own: torch.Tensor, num_top: int, rows: Int | None = None) -> LogprobEntries:
    """Report on n rows of ``logits [S, vocab]``, of any dtype; computed in fp32.

    own: int32[n], the tokens asked about; rows: int64[n], or None for the first n. The reference of
    `quintet.executor.sampling.logprob_entries_on_host`.
    """
    chosen = logits[: len(own)] if rows is None else logits[to_device(rows, logits.device)]
    logprobs = torch.log_softmax(chosen, dim=-1, dtype=torch.float32)
    normalizers = chosen.amax(dim=-1).double() - logprobs.amax(dim=-1).double()
    column = own.long().unsqueeze(1)
    mine = logprobs.gather(1, column)
    ranks = (logprobs > mine).sum(dim=-1).add_(1)
    top = logprobs.topk(num_top, dim=-1)
    return LogprobEntries(
        torch.cat((column, top.indices), dim=1).to(torch.int32).cpu().numpy(),
        torch.cat((mine, top.values), dim=1).cpu().numpy(),
        ranks.to(torch.int32).cpu().numpy(),
        normalizers.cpu().numpy(),
    )
