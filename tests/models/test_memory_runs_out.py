"""The real worker over a model for which memory runs out: its steps are smaller, its words are the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.families import FAMILIES, prompts_of
from tests.models.test_engine import GREEDY, NUM_TOKENS, House, changed

from quintet.executor.batch import Rows
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import SlotTables
from quintet.executor.worker import Worker


def narrow(worker: Worker, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a forward pass of more tokens run out of memory."""
    forward, forward_and_draw = worker.runner.forward, worker.runner.forward_and_draw

    def narrow_forward(rows: Rows, tables: SlotTables) -> None:
        if rows.counts.sum() > max_tokens:
            raise torch.OutOfMemoryError(f"{rows.counts.sum()} tokens")
        forward(rows, tables)

    def narrow_draw(
        rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> bytes | None:
        if rows.counts.sum() > max_tokens:
            raise torch.OutOfMemoryError(f"{rows.counts.sum()} tokens")
        return forward_and_draw(rows, tables, settings, masks)

    monkeypatch.setattr(worker.runner, "forward", narrow_forward)
    monkeypatch.setattr(worker.runner, "forward_and_draw", narrow_draw)


@pytest.mark.parametrize("max_tokens", [1, 7])
def test_tokens_do_not_depend_on_memory(
    max_tokens: int, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    worker = served.core.worker
    narrow(worker, max_tokens, monkeypatch)
    house = House(changed(served.config), worker)
    prompts = prompts_of()
    for i, prompt in enumerate(prompts):
        house.admit(i + 1, prompt, GREEDY)
    house.run()
    assert worker.num_split > 0
    expected = served.greedy(prompts, NUM_TOKENS)
    assert [house.outputs[i + 1] for i in range(len(prompts))] == expected
