"""Row ``invariance`` of docs/gpu.md: with ``--batch-invariant``, the bits of a request do not depend on the batch.

The test compares the log-probabilities of the 20 most likely tokens at every output position, bit for bit. All of them
share one normaliser, so a change of any logit by one unit in the last place changes them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.gpu.small import (
    Dtype,
    dummy_config,
    params,
    prompts,
    ready_worker,
    run_all,
    with_blocks,
    with_scheduler,
)

from quintet.executor.interface import StepWorker
from quintet.wire.config import EngineConfig

NUM_TOKENS = 24
NUM_REQUESTS = 64
WATCHED = (1, 14, 27, 40)
"""Requests that are also computed alone."""
VOCAB = 200

Bits = list[tuple[int, bytes, bytes]]


def bits_of(config: EngineConfig, worker: StepWorker, numbers: range | tuple[int, ...]) -> dict[int, Bits]:
    """Compute the requests of these numbers together; return the log-probabilities of each token."""
    everything = prompts(NUM_REQUESTS, VOCAB)
    requested = {
        number: (everything[number - 1], params(number, NUM_TOKENS, logprobs=20)) for number in numbers
    }
    logprobs = run_all(config, worker, requested).logprobs
    return {
        number: [(each.rank, each.token_ids, each.logprobs) for each in positions]
        for number, positions in logprobs.items()
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bits_do_not_depend_on_the_batch(dtype: Dtype, tmp_path: Path, device_name: str) -> None:
    config = dummy_config(tmp_path, device_name, dtype=dtype, batch_invariant=True)
    worker = ready_worker(config)
    together = bits_of(config, worker, range(1, NUM_REQUESTS + 1))
    assert all(len(logprobs) == NUM_TOKENS for logprobs in together.values())
    for number in WATCHED:
        assert bits_of(config, worker, (number,))[number] == together[number], f"request {number} alone"
    in_chunks = with_scheduler(config, max_num_batched_tokens=93, long_prefill_token_threshold=37)
    assert bits_of(in_chunks, worker, range(1, NUM_REQUESTS + 1)) == together, "in chunks"
    synchronous = with_scheduler(config, max_steps_in_flight=1)
    assert bits_of(synchronous, worker, range(1, NUM_REQUESTS + 1)) == together, "without overlap"


def test_bits_do_not_depend_on_preemption(tmp_path: Path, device_name: str) -> None:
    config = dummy_config(tmp_path, device_name, batch_invariant=True)
    reference = bits_of(config, ready_worker(config), range(1, NUM_REQUESTS + 1))
    small = with_blocks(config, 96)
    assert bits_of(small, ready_worker(small), range(1, NUM_REQUESTS + 1)) == reference


def test_eager_step_has_the_bits_of_a_captured_step(tmp_path: Path, device_name: str) -> None:
    captured = dummy_config(tmp_path, device_name, batch_invariant=True)
    eager = dummy_config(tmp_path, device_name, batch_invariant=True, enforce_eager=True)
    assert bits_of(eager, ready_worker(eager), WATCHED) == bits_of(captured, ready_worker(captured), WATCHED)
