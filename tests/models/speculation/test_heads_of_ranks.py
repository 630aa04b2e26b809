"""Draft heads on rank 0: drafts are those of a reference, and outputs are those of the same ranks without drafts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import transformers
from tests.models.distributed.ranks import in_ranks
from tests.models.equality import few_blocks, with_blocks
from tests.models.random_checkpoints import write_checkpoint
from tests.models.speculation.draft_heads import (
    Head,
    eagle3_head,
    eagle_head,
    medusa_heads,
    record_drafts,
)
from tests.models.speculation.mtp_checkpoints import KINDS, write
from tests.models.speculation.test_bits import PARAMS, drafting, run
from tests.models.test_engine import changed
from tests.models.test_equal import ROWS

from quintet.core import recurrent_state

HEADS: dict[str, Callable[[], Head]] = {"eagle": eagle_head, "eagle3": eagle3_head, "medusa": medusa_heads}
LAYOUTS = [
    ("eagle", 2, 1),
    ("eagle3", 2, 1),
    ("medusa", 2, 1),
    ("eagle3", 4, 2),
    *((name, 2, 1) for name in ("mimo", "glm4 moe, three layers", "deepseek v3", "qwen 3.5")),
    ("mimo", 4, 2),
]
"""Head or model, ranks, and ranks that share KV memory."""


def made(name: str, folder: Path) -> tuple[str, Any]:
    """Write a model with a head; return the flag, and a function that returns the drafts after some tokens."""
    keys: dict[str, object] = {"method": "mtp", "num_speculative_tokens": 4}
    if name in KINDS:
        return json.dumps(keys), write(name, folder).drafts
    write_checkpoint(ROWS["llama"], folder)
    reference, head = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), HEADS[name]()
    (folder / "head").mkdir()
    head.save(folder / "head")
    keys |= {"method": name, "model": str(folder / "head")}
    return json.dumps(keys), lambda tokens, count: head.drafts(reference, tokens, count)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("params", ["greedy", "sampled", "logprobs"])
@pytest.mark.parametrize(("name", "size", "context"), LAYOUTS)
def test_heads_change_no_output_of_ranks(
    name: str, size: int, context: int, params: str, tmp_path: Path
) -> None:
    flag, reference = made(name, tmp_path)
    with (
        mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32),
        in_ranks(tmp_path, size, context=context, speculative_config=flag) as loaded,
    ):
        worker: Any = loaded.worker
        plain = run(changed(loaded.config, speculative=None), worker, PARAMS[params])
        found = record_drafts(drafting(worker))
        config = changed(loaded.config)
        for each in (config, with_blocks(config, few_blocks(config))):
            driver = run(each, worker, PARAMS[params])
            assert driver.outputs == plain.outputs and driver.logprobs == plain.logprobs
            assert driver.engine.state is not None
            assert driver.engine.state.counters.num_draft_tokens > 20
    if params != "greedy":
        return
    proposals = [each for each in found if each[1]]
    for tokens, drafts in proposals[:: len(proposals) // 8]:
        expected = reference(tokens, len(drafts))
        assert drafts[: len(expected)] == expected
