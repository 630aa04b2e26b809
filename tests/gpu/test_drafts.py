"""Row ``steps`` of docs/gpu.md, drafts: with ``--batch-invariant``, speculative decoding changes no bit.

In the first test, the drafts are the tokens of a run without drafts, one in four of them wrong, so that all numbers of
accepted drafts occur.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from bench.gpu.engine import InProcessEngine
from tests.gpu.small import dummy_config, prompts, ready_worker, run_all, with_blocks, with_scheduler
from tests.models.speculation.longest_drafts import drafting
from tests.models.speculation.test_bits import Oracle
from tests.models.speculation.test_draft_model import with_draft

from quintet.wire.config import EngineConfig, SpeculativeConfig
from quintet.wire.params import SamplingParams

DRAFTS = SpeculativeConfig(num_speculative_tokens=4)
NUM_TOKENS = 24
NUM_REQUESTS = 12
VOCAB = 200
PARAMS = (
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=1.0, top_p=0.95, top_k=40),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.4, logprobs=0),
    SamplingParams(temperature=1.0, logit_bias={5: 4.0}, min_tokens=NUM_TOKENS),
)


def requested() -> dict[int, tuple[list[int], SamplingParams]]:
    fields: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {
        number: (prompt, msgspec.structs.replace(PARAMS[number % len(PARAMS)], seed=number, **fields))
        for number, prompt in enumerate(prompts(NUM_REQUESTS, VOCAB), 1)
    }


def bits_of(engine: InProcessEngine) -> dict[int, list[tuple[int, bytes, bytes]]]:
    return {
        number: [(each.rank, each.token_ids, each.logprobs) for each in positions]
        for number, positions in engine.logprobs.items()
    }


def config_of(folder: Path, device_name: str) -> EngineConfig:
    return with_scheduler(dummy_config(folder, device_name, batch_invariant=True), max_num_seqs=16)


def test_drafts_change_no_bit(tmp_path: Path, device_name: str) -> None:
    config = config_of(tmp_path, device_name)
    plain = run_all(config, ready_worker(config), requested())
    drafted = with_scheduler(config, speculative=DRAFTS)
    worker: Any = drafting(ready_worker(drafted))
    sequences = [prompt + plain.outputs[number] for number, (prompt, _) in requested().items()]
    variants: dict[str, EngineConfig] = {
        "together": drafted,
        "in chunks": with_scheduler(drafted, max_num_batched_tokens=93, long_prefill_token_threshold=37),
        "preempted": with_blocks(drafted, 40),
    }
    for variant, each in variants.items():
        worker._speculation.drafter = Oracle(worker, sequences)
        found = run_all(each, worker, requested())
        assert found.outputs == plain.outputs, variant
        assert bits_of(found) == bits_of(plain), variant
        assert found.counters.num_accepted_tokens > NUM_TOKENS, variant


def test_draft_model_changes_no_bit(tmp_path: Path, device_name: str) -> None:
    """The draft model is the served model, so nearly all drafts are accepted."""
    config = config_of(tmp_path, device_name)
    plain = run_all(config, ready_worker(config), requested())
    drafted = with_draft(config, config)
    worker = drafting(ready_worker(drafted))
    for variant, each in {"together": drafted, "preempted": with_blocks(drafted, 40)}.items():
        found = run_all(each, worker, requested())
        assert found.outputs == plain.outputs, variant
        assert bits_of(found) == bits_of(plain), variant
        assert found.counters.num_accepted_tokens > 0.9 * found.counters.num_draft_tokens > 100, variant
