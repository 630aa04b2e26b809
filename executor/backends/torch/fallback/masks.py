"""Derives a layer's attention window from its mask function of transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.models.layers.attention import AttentionWindow

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``f(batch, head, query position, key position)``: whether the query attends to the key, for index tensors of one shape."""


class UnsupportedMask(Exception):
    """A mask that is neither causal, nor a window, nor a chunk; the message is the reason."""


def window_of(function: MaskFunction, length: int, device: torch.device) -> AttentionWindow:
    """Return the window of ``function`` for sequences of up to ``length`` tokens. Raises `UnsupportedMask`.

    The last position determines the candidates; the mask must match one of them at several positions, in every key.
    """
    visible = _visible(function, length - 1, length, device)
    if bool(visible.all()):
        candidates = [AttentionWindow()]
    else:
        first = int((~visible).sum())  # first visible position of a window or a chunk
        candidates = [AttentionWindow(window=length - first), *_chunks(function, length, first, device)]
    for candidate in candidates:
        if all(_matches(function, candidate, at, length, device) for at in _sample_positions(length)):
            return candidate
    for at in _sample_positions(length):
        if bool(_visible(function, at, length, device)[at + 1 :].any()):
            raise UnsupportedMask("its attention is not causal")
    raise UnsupportedMask("its attention mask is neither causal, nor a window, nor a chunk")


def _chunks(function: MaskFunction, length: int, first: int, device: torch.device) -> list[AttentionWindow]:
    """Return the chunk size derived from the first position that does not attend to position 0."""
    positions = torch.arange(length, device=device)
    zero = torch.zeros_like(positions)
    masked = (~function(zero, zero, positions, zero)).nonzero()
    if not len(masked):
        return []
    chunk = int(masked[0])
    return [AttentionWindow(chunk=chunk)] if chunk and first % chunk == 0 else []


def _sample_positions(length: int) -> list[int]:
    return sorted(
        {0, 1, 2, length // 7, length // 3, length // 2, 2 * length // 3, length - 2, length - 1}
        & set(range(length))
    )


def _visible(function: MaskFunction, at: int, length: int, device: torch.device) -> torch.Tensor:
    keys = torch.arange(length, device=device)
    zero = torch.zeros_like(keys)
    return function(zero, zero, torch.full_like(keys, at), keys).expand(length)


def _matches(
    function: MaskFunction, candidate: AttentionWindow, at: int, length: int, device: torch.device
) -> bool:
    keys = torch.arange(length, device=device)
    expected = keys <= at
    if candidate.window is not None:
        expected &= keys > at - candidate.window
    if candidate.chunk is not None:
        expected &= keys // candidate.chunk == at // candidate.chunk
    return bool((_visible(function, at, length, device) == expected).all())
