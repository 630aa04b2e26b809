"""Row ``steps`` of docs/gpu.md: graphs, padding, overlap and swapping change no token.

The bits of cuBLAS may depend on the batch, so batches keep their composition where it multiplies. Preemption and swapping
change the composition; there the engine is batch-invariant.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.gpu.engine import run_idle_tasks
from tests.gpu.small import (
    dummy_config,
    params,
    prompts,
    ready_worker,
    run_all,
    with_blocks,
    with_executor,
    with_scheduler,
)

from quintet.executor.backends.registry import make_worker
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams

NUM_TOKENS = 48
FEW_TOKENS = 8
"""Number of steps before a busy worker captures its first graph."""
VOCAB = 200


@pytest.fixture
def config(tmp_path: Path, device_name: str) -> EngineConfig:
    return dummy_config(tmp_path, device_name)


def prompts_of_one_length(num: int, max_tokens: int) -> dict[int, tuple[list[int], SamplingParams]]:
    """Return prompts of one length: submitted together they begin and end together, so every step has the same rows."""
    return {number: ([number % VOCAB] * 20, params(number, max_tokens)) for number in range(1, num + 1)}


@pytest.mark.parametrize("num", [1, 8, 64])
def test_captured_step_draws_the_tokens_of_an_eager_step(
    config: EngineConfig, num: int, device_name: str
) -> None:
    """Numbers of rows without padding: one worker runs the same kernels, first without graphs."""
    worker = make_worker(config)
    requested = prompts_of_one_length(num, FEW_TOKENS)
    eager = run_all(config, worker, requested).outputs
    assert worker.has_idle_tasks or device_name == "cpu", "the worker captures no graphs"
    run_idle_tasks(worker)
    assert run_all(config, worker, requested).outputs == eager


@pytest.mark.parametrize("num", [3, 13, 64])
def test_padding_of_captured_steps_changes_no_token(config: EngineConfig, num: int) -> None:
    captured = with_executor(config, batch_invariant=True)
    eager = with_executor(captured, enforce_eager=True)
    requested = prompts_of_one_length(num, NUM_TOKENS)
    expected = run_all(eager, make_worker(eager), requested).outputs
    assert run_all(captured, ready_worker(captured), requested).outputs == expected


def test_overlap_changes_no_token(config: EngineConfig) -> None:
    config = with_executor(config, batch_invariant=True)
    worker = ready_worker(config)
    requested = {
        number: (prompt, params(number, NUM_TOKENS)) for number, prompt in enumerate(prompts(40, VOCAB), 1)
    }
    together = run_all(with_scheduler(config, max_steps_in_flight=2), worker, requested)
    assert (
        run_all(with_scheduler(config, max_steps_in_flight=1), worker, requested).outputs == together.outputs
    )


def test_swapping_and_recomputing_change_no_token(config: EngineConfig) -> None:
    config = with_executor(config, batch_invariant=True)
    requested = {number: (prompt, params(number, 96)) for number, prompt in enumerate(prompts(24, VOCAB), 1)}
    reference = run_all(config, ready_worker(config), requested)
    assert reference.counters.preemptions == 0
    for host_blocks in (0, 300):
        small = with_blocks(config, 80, swap_bytes=host_blocks * config.model.kv.bytes_per_block)
        pushed_out = run_all(small, ready_worker(small), requested)
        assert pushed_out.counters.preemptions > 0
        assert (pushed_out.counters.swap_in_blocks > 0) == (host_blocks > 0)
        assert pushed_out.outputs == reference.outputs
