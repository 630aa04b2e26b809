"""The real worker with a model that runs out of memory: steps are split, and the tokens stay the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.equality import load, run
from tests.models.random_checkpoints import expectations, write_checkpoint
from tests.models.rows.states import ROWS
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.test_engine import GREEDY, NUM_TOKENS, CoreAndWorker, changed

from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.worker import Worker


def limit_tokens(worker: Worker, max_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a forward pass of more tokens run out of memory after all its writes."""
    forward, forward_and_draw = worker.runner.forward, worker.runner.forward_and_draw

    def limited_forward(rows: Rows, tables: SlotTables) -> None:
        forward(rows, tables)
        if rows.counts.sum() > max_tokens:
            raise torch.OutOfMemoryError(f"{rows.counts.sum()} tokens")

    def limited_draw(
        rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> bytes | None:
        tokens = forward_and_draw(rows, tables, settings, masks)
        if rows.counts.sum() > max_tokens:
            raise torch.OutOfMemoryError(f"{rows.counts.sum()} tokens")
        return tokens

    monkeypatch.setattr(worker.runner, "forward", limited_forward)
    monkeypatch.setattr(worker.runner, "forward_and_draw", limited_draw)


@pytest.mark.parametrize("max_tokens", [1, 7])
def test_tokens_do_not_depend_on_memory(
    max_tokens: int, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    worker = served.core.worker
    limit_tokens(worker, max_tokens, monkeypatch)
    engine = CoreAndWorker(changed(served.config), worker)
    prompts = prompts_of()
    for i, prompt in enumerate(prompts):
        engine.admit(i + 1, prompt, GREEDY)
    engine.run()
    assert worker.num_split > 0
    expected = served.greedy(prompts, NUM_TOKENS)
    assert [engine.outputs[i + 1] for i in range(len(prompts))] == expected


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_states_do_not_depend_on_memory(
    compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step contains only new requests: it is computed once more, and its size limits the others."""
    row = ROWS["lfm2"]
    expected = expectations(write_checkpoint(row, tmp_path))
    loaded = load(tmp_path, compiled=compiled)
    limit_tokens(loaded.worker, 7, monkeypatch)
    outcome = run(
        loaded, changed(loaded.config, max_num_batched_tokens=37), [each.prompt for each in expected]
    )
    assert outcome.outputs == [each.outputs for each in expected]
    assert loaded.worker.num_split > 1
