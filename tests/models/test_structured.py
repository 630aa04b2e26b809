"""Structured outputs of a model: the same alone, together, in chunks, preempted, and resumed in another executor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.models import byte_vocabulary
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.test_engine import CoreAndWorker, changed, small_kv, without_prefix_cache

from quintet.executor.backends.registry import make_worker
from quintet.wire.config import EngineConfig
from quintet.wire.step import Capacity


def run(config: EngineConfig, worker: Any, which: list[int]) -> dict[int, list[int]]:
    """Run these requests together."""
    driver = CoreAndWorker(config, worker)
    for number in which:
        driver.admit(
            number + 1, prompts_of()[number % len(prompts_of())], byte_vocabulary.requested()[number]
        )
    driver.run()
    return {number: driver.outputs[number + 1] for number in which}


@pytest.mark.parametrize("serve", [16], indirect=True)
def test_outputs_match_their_format_in_every_schedule(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    config = byte_vocabulary.with_vocabulary(changed(served.config, max_num_seqs=8), tmp_path)
    worker = make_worker(config)
    everyone = list(range(len(byte_vocabulary.requested())))
    together = run(config, worker, everyone)
    byte_vocabulary.check(together)
    for number in everyone:
        assert run(config, worker, [number])[number] == together[number], f"{number} alone"
    variants = {
        "in chunks": changed(config, max_num_batched_tokens=17, long_prefill_token_threshold=5),
        "synchronous": without_prefix_cache(changed(config, max_steps_in_flight=1)),
        "preempted": small_kv(config),
    }
    for name, variant in variants.items():
        assert run(variant, worker, everyone) == together, name


@pytest.mark.parametrize("serve", [16], indirect=True)
def test_another_executor_resumes_the_requests(serve: Callable[..., Any], tmp_path: Path) -> None:
    """The outputs return with the request."""
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    config = byte_vocabulary.with_vocabulary(changed(served.config, max_num_seqs=8), tmp_path)
    whole = run(config, make_worker(config), [0, 1])
    driver = CoreAndWorker(config)
    for number in (0, 1):
        driver.admit(number + 1, prompts_of()[number], byte_vocabulary.requested()[number])
    for _ in range(4):
        plan = driver.engine.plan(0)
        assert plan is not None
        driver._apply(driver.engine.commit(driver.worker.begin(plan).result(), 0))
    driver.worker = make_worker(config)  # the first executor is gone
    limits = (config.scheduler.max_num_seqs, config.model.max_model_len)
    num_blocks = config.cache.memory_bytes // config.model.kv.bytes_per_block
    driver._apply(driver.engine.capacity(Capacity(2, num_blocks, driver.block_size, *limits), 0))
    driver.run()
    assert {number: driver.outputs[number + 1] for number in (0, 1)} == whole
