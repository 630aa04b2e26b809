"""A rehearsal at boot: a model nobody here has seen computes two sequences side by side and in chunks, and each by itself.

What is told before loading is what the model asks its attention for. That it depends on nothing else (that positions are obeyed,
that no layer keeps a state of its own, that no token sees its neighbour in the step) is shown by computing: logits over paged
memory must be those of transformers' own attention over the whole sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quintet.executor.backends.torch.fallback.attention import NotServed
from quintet.executor.backends.torch.fallback.model import TransformersModel
from quintet.executor.batch import Rows
from quintet.executor.runner import Runner
from quintet.executor.sequences import Piece, place, plan_of_pieces
from quintet.executor.slots import SlotTables
from quintet.wire.config import ModelConfig

LENGTHS = (21, 13)
"""Of the sequences. The first is computed in two steps, the second beside its first part."""

CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""How far the middlemost token's logits may be, as a share of their spread. Rounding through many layers is below it; a position
or a neighbour that is wrong moves every token by about its whole spread. The middlemost, since a tie between experts may fall
either way."""


class SelfCheck:
    """Two sequences with what transformers says of them."""

    def __init__(self, model: TransformersModel, config: ModelConfig, device: torch.device) -> None:
        """Compute them with transformers alone. Raises `NotServed` for logits of another number than the card has."""
        generator = torch.Generator().manual_seed(0)
        self._config = config
        self._sequences = [
            torch.randint(config.vocab_size, (min(length, config.max_model_len),), generator=generator)
            for length in LENGTHS
        ]
        with torch.inference_mode():
            self._wanted = [model.whole_logits(tokens.to(device)) for tokens in self._sequences]
        if self._wanted[0].shape[1] != config.vocab_size:
            raise NotServed(
                f"it gives {self._wanted[0].shape[1]} logits, and its card was understood to say {config.vocab_size}"
            )

    def run(self, runner: Runner, tables: SlotTables, num_blocks: int) -> None:
        """Raise `NotServed` where steps over paged memory do not give the same. Nobody may be in the tables."""
        num_groups, num_slots, _ = tables.block_table.shape
        lengths = [len(tokens) for tokens in self._sequences]
        width = -(-max(lengths) // self._config.kv.block_size)
        lengths = lengths[: min(num_slots, num_blocks // (width * num_groups))]
        if not lengths:
            return
        for slot, tokens in enumerate(self._sequences[: len(lengths)]):
            place(tables, slot, tokens, width)
        part = lengths[0] // 3
        first: list[Piece] = [(0, 0, part)] + [(i, 0, n) for i, n in enumerate(lengths) if i]
        with torch.inference_mode():
            for pieces in (first, [(0, part, lengths[0] - part)]):
                _compare(runner, tables, pieces, self._wanted)


def _compare(
    runner: Runner, tables: SlotTables, pieces: Sequence[Piece], wanted: Sequence[torch.Tensor]
) -> None:
    """Compute one step and compare all of its tokens."""
    runner.forward(Rows(plan_of_pieces(pieces, draws=True)), tables)
    found = runner.logits(np.arange(sum(count for _, _, count in pieces))).float()
    right = torch.cat([wanted[i][start : start + count] for i, start, count in pieces]).float()
    apart = (found - right).norm(dim=1) / (right - right.mean(1, keepdim=True)).norm(dim=1)
    dtype = wanted[0].dtype
    if not float(apart.median()) < CLOSE.get(dtype, CLOSE[torch.bfloat16]):
        raise NotServed(
            f"computed in steps, its logits are off by {float(apart.median()):.2g} of their spread: its layers keep more of the"
            " past than keys and values, or do not go by the positions they are given"
        )
