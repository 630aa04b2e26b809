"""Draws of draft models and heads.

A draft is likely to be accepted if it is drawn as the served model draws: with the same random number, temperature and filters,
and with the logits processors of the request. Penalties and bad words read the drafts before it in the token table.
"""

from __future__ import annotations

import torch

from quintet.executor.runner import Runner
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import Rows, SlotTables


def compute_and_draw(
    runner: Runner, rows: Rows, tables: SlotTables, sampler: Sampler, *, has_same_ids: bool
) -> bytes:
    """Compute the rows and draw a token where a row draws; return the tokens, int32. The token table holds them too.

    runner, tables: of the draft model. sampler: of the served model. has_same_ids: the logits are those of the served model's
    tokens; otherwise its logits processors do not apply.
    """
    if has_same_ids and sampler.shapes(rows):
        runner.forward(rows, tables)
        with torch.inference_mode():  # as the served model's draws: both use one buffer
            drawn, _ = sampler.draw(rows, runner.logits(rows.draw_tokens), is_draft=True)
            return drawn.numpy().tobytes()
    tokens = runner.forward_and_draw(rows, tables, sampler.settings, None)
    assert tokens is not None, "the runner of a draft model draws"
    return tokens
