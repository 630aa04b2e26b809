"""Log-probability entries of logit rows: one token's log-probability and rank, and the most likely tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quintet.executor.memory import to_device
from quintet.executor.ragged import Int


@dataclass(frozen=True, slots=True)
class LogprobEntries:
    """Entries of n rows, on the host."""

    ids: NDArray[np.int32]
    """``[n, 1 + num_top]``: the given token first, then the most likely ones."""
    values: NDArray[np.float32]
    """Log-probabilities of ``ids``."""
    ranks: NDArray[np.int32]
    """``[n]``: 1 plus the number of tokens more likely than the given one."""
    normalizers: NDArray[np.float64]
    """``[n]``: logit minus normalizer is the log-probability."""


def entries(logits: torch.Tensor, own: torch.Tensor, num_top: int, rows: Int | None = None) -> LogprobEntries:
    """Return entries of n rows of ``logits [S, vocab]`` of any dtype, computed in fp32.

    own: int32[n], the given tokens; rows: int64[n], or None for the first n. Reference of
    `quintet.executor.sampling.host_kernels`.
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
