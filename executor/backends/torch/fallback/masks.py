"""Which tokens a layer of transformers sees, found out from the function it would make its mask with."""

from __future__ import annotations

from collections.abc import Callable

import torch

from quintet.executor.models.layers.attention import AttentionWindow

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""``f(batch, head, query's position, key's position)``: whether the query sees the key, for index tensors of one shape."""


class UnknownSight(Exception):
    """A mask that is neither causal nor a window nor a chunk; the message says how."""


def sight_of(function: MaskFunction, length: int, device: torch.device) -> AttentionWindow:
    """Return what ``function`` shows, for sequences of up to ``length`` tokens. Raises `UnknownSight`.

    The last position tells which window or chunk it would have to be; that and some positions more must agree in every key.
    """
    seen = _seen(function, length - 1, length, device)
    if bool(seen.all()):
        sights = [AttentionWindow()]
    else:
        first = int((~seen).sum())  # of a window or a chunk, the first that is seen
        sights = [AttentionWindow(window=length - first), *_chunks(function, length, first, device)]
    for sight in sights:
        if all(_agrees(function, sight, at, length, device) for at in _some_positions(length)):
            return sight
    for at in _some_positions(length):
        if bool(_seen(function, at, length, device)[at + 1 :].any()):
            raise UnknownSight("a token sees later ones")
    raise UnknownSight("what a token sees is neither all before it, nor a window, nor a chunk")


def _chunks(function: MaskFunction, length: int, first: int, device: torch.device) -> list[AttentionWindow]:
    """Return the chunk that the first position tells which does not see position 0."""
    positions = torch.arange(length, device=device)
    zero = torch.zeros_like(positions)
    blind = (~function(zero, zero, positions, zero)).nonzero()
    if not len(blind):
        return []
    chunk = int(blind[0])
    return [AttentionWindow(chunk=chunk)] if chunk and first % chunk == 0 else []


def _some_positions(length: int) -> list[int]:
    return sorted(
        {0, 1, 2, length // 7, length // 3, length // 2, 2 * length // 3, length - 2, length - 1}
        & set(range(length))
    )


def _seen(function: MaskFunction, at: int, length: int, device: torch.device) -> torch.Tensor:
    keys = torch.arange(length, device=device)
    zero = torch.zeros_like(keys)
    return function(zero, zero, torch.full_like(keys, at), keys).expand(length)


def _agrees(
    function: MaskFunction, sight: AttentionWindow, at: int, length: int, device: torch.device
) -> bool:
    keys = torch.arange(length, device=device)
    wanted = keys <= at
    if sight.window is not None:
        wanted &= keys > at - sight.window
    if sight.chunk is not None:
        wanted &= keys // sight.chunk == at // sight.chunk
    return bool((_seen(function, at, length, device) == wanted).all())
