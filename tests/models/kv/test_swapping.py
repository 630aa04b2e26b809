"""The real core over the real worker with too little KV memory: swapped blocks are restored unchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.test_engine import (
    GREEDY,
    NUM_TOKENS,
    CoreAndWorker,
    changed,
    small_kv,
    without_prefix_cache,
)

from quintet.executor.backends.cpu import backend as cpu_backend
from quintet.executor.backends.registry import make_worker
from quintet.executor.backends.torch.eager import EagerRunner
from quintet.wire.config import EngineConfig

NUM_HOST_BLOCKS = 64
"""Enough for every request's blocks."""


def with_host_memory(config: EngineConfig) -> EngineConfig:
    size = NUM_HOST_BLOCKS * config.model.kv.bytes_per_block
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, swap_bytes=size))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("caching", [True, False])
def test_tokens_do_not_depend_on_swapping(
    compiled: bool, caching: bool, serve: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    prompts = prompts_of()
    expected = served.greedy(prompts, NUM_TOKENS)
    config = small_kv(changed(served.config))
    if not caching:
        config = without_prefix_cache(config)
    if not compiled:
        monkeypatch.setattr(cpu_backend, "program_library", lambda: None)
    for variant in (config, with_host_memory(config)):
        worker = make_worker(variant)
        assert compiled or isinstance(worker.runner, EagerRunner)
        driver = CoreAndWorker(variant, worker)
        for i, prompt in enumerate(prompts):
            driver.admit(i + 1, prompt, GREEDY)
        driver.run()
        assert [driver.outputs[i + 1] for i in range(len(prompts))] == expected
        assert driver.engine.state is not None
        counters = driver.engine.state.counters
        assert counters.preemptions > 0
        assert (counters.swap_in_blocks > 0) == (variant is not config), counters
