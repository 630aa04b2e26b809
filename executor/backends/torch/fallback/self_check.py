"""Self-check at startup: two sequences, batched and in chunks over paged memory, must match transformers' own attention.

The check before loading only covers the attention calls. The self-check verifies the rest: positions are used, no layer has other
state, and tokens of other rows have no influence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quintet.executor.backends.torch.fallback.attention import UnsupportedModel
from quintet.executor.backends.torch.fallback.model import TransformersModel
from quintet.executor.runner import Runner
from quintet.executor.sequences import SequencePart, place, plan_of_parts
from quintet.executor.slots import Rows, SlotTables
from quintet.wire.config import ModelConfig

LENGTHS = (21, 13)
"""Sequence lengths. The first sequence is computed in two steps, the second in one step with its first part."""

MAX_ERROR = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Limit of the median token's error, relative to the spread of its logits. Rounding stays below it; a wrong position or mask
causes an error of about 1 in every token. The median tolerates ties between experts."""


class SelfCheck:
    """Two sequences with the expected logits."""

    def __init__(self, model: TransformersModel, config: ModelConfig, device: torch.device) -> None:
        """Compute the expected logits. Raises `UnsupportedModel` if their width differs from the config's vocabulary size."""
        generator = torch.Generator().manual_seed(0)
        self._config = config
        self._sequences = [
            torch.randint(config.vocab_size, (min(length, config.max_model_len),), generator=generator)
            for length in LENGTHS
        ]
        with torch.inference_mode():
            self._expected = [model.whole_logits(tokens.to(device)) for tokens in self._sequences]
        if self._expected[0].shape[1] != config.vocab_size:
            raise UnsupportedModel(
                f"it returns {self._expected[0].shape[1]} logits, but its config implies {config.vocab_size}"
            )

    def run(self, runner: Runner, tables: SlotTables, num_blocks: int) -> None:
        """Raise `UnsupportedModel` if steps over paged memory give other logits. The tables must have no active slot."""
        num_groups, num_slots, _ = tables.block_table.shape
        lengths = [len(tokens) for tokens in self._sequences]
        width = -(-max(lengths) // self._config.kv.block_size)
        lengths = lengths[: min(num_slots, num_blocks // (width * num_groups))]
        if not lengths:
            return
        for slot, tokens in enumerate(self._sequences[: len(lengths)]):
            place(tables, slot, tokens, width)
        part = lengths[0] // 3
        first: list[SequencePart] = [(0, 0, part)] + [(i, 0, n) for i, n in enumerate(lengths) if i]
        with torch.inference_mode():
            for pieces in (first, [(0, part, lengths[0] - part)]):
                _compare(runner, tables, pieces, self._expected)


def _compare(
    runner: Runner, tables: SlotTables, pieces: Sequence[SequencePart], expected: Sequence[torch.Tensor]
) -> None:
    """Compute one step and compare all its tokens."""
    runner.forward(Rows(plan_of_parts(pieces, draws=True)), tables)
    actual = runner.logits(np.arange(sum(count for _, _, count in pieces))).float()
    target = torch.cat([expected[i][start : start + count] for i, start, count in pieces]).float()
    errors = (actual - target).norm(dim=1) / (target - target.mean(1, keepdim=True)).norm(dim=1)
    dtype = expected[0].dtype
    if not float(errors.median()) < MAX_ERROR.get(dtype, MAX_ERROR[torch.bfloat16]):
        raise UnsupportedModel(
            f"the self-check failed: logits differ by {float(errors.median()):.2g} of their spread: its layers have state"
            " other than keys and values, or ignore positions"
        )
