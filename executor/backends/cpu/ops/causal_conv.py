"""Depthwise causal convolution; its state is the last inputs of a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from quintet.executor.backends.cpu.ops.state_rows import StateRows


def causal_conv(
    rows: StateRows,
    states: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Return ``bias + sum over j of weight[j] * x[t - (taps - 1) + j]``, rounded, with SiLU applied if ``silu``.

    x: ``[T, channels]``; weight: float32 ``[taps, channels]``, newest input last; states: ``[num_blocks, taps - 1, channels]``
    in the dtype of x, overwritten.
    """
    old = len(weight) - 1
    before = rows.load(states)  # [R, old, channels]
    # Line i of `inputs` is token i of the step; the states of all rows follow the tokens.
    inputs = torch.cat((x, before.reshape(-1, x.shape[1])))

    def lines(row: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the line of input ``index`` of a row; a negative index reads the state, -1 is the newest."""
        return torch.where(index >= 0, rows.offsets[row] + index, len(x) + (row + 1) * old + index)

    tokens = torch.arange(len(x), device=x.device)
    owners = torch.searchsorted(rows.offsets + rows.counts, tokens, right=True).clamp_(
        max=len(rows.counts) - 1
    )
    within = tokens - rows.offsets[owners]
    total = x.new_zeros(x.shape, dtype=torch.float32) if bias is None else bias.expand(x.shape).clone()
    for j, factor in enumerate(weight):
        total += factor * inputs[lines(owners, within - (old - j)).clamp_(0, len(inputs) - 1)]
    newest = rows.counts[:, None] + torch.arange(-old, 0, device=x.device)  # [R, old]
    numbers = torch.arange(len(rows.counts), device=x.device)[:, None]
    rows.save(states, inputs[lines(numbers, newest)])
    y = total.to(x.dtype)
    return F.silu(y.float()).to(x.dtype) if silu else y
