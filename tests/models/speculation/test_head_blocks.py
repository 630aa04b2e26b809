"""KV blocks of a draft head: drafts after shared, copied and restored blocks are those of the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.speculation.draft_heads import eagle3_head, record_drafts, with_head
from tests.models.speculation.test_bits import drafting_worker
from tests.models.test_engine import CoreAndWorker, changed, small_kv

from quintet.executor.worker import Worker
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, seed=0)


class HeadBench:
    """A served model with a random head, and the proposals of each run."""

    def __init__(self, served: Any, folder: Any, limits: Mapping[str, int], **cache: Any) -> None:
        """limits: changes of the scheduler's configuration."""
        self._served, self.head = served, eagle3_head()
        config = with_head(changed(served.config, **limits), folder, self.head)
        self.config: EngineConfig = msgspec.structs.replace(
            config, cache=msgspec.structs.replace(config.cache, **cache)
        )
        self.worker: Worker = drafting_worker(self.config)
        self._found = record_drafts(self.worker)

    def start(self, config: EngineConfig) -> CoreAndWorker:
        self._found.clear()
        return CoreAndWorker(config, self.worker)

    def proposals(self) -> list[tuple[list[int], list[int]]]:
        return [each for each in self._found if each[1]]

    def check(self, num_proposals: int) -> None:
        """Check some of the proposals since the start."""
        proposals = self.proposals()
        assert len(proposals) >= num_proposals
        for tokens, drafts in proposals[:: max(1, len(proposals) // 12)]:
            assert drafts == self.head.drafts(self._served.reference, tokens, len(drafts)), len(tokens)


@pytest.fixture
def bench(tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]) -> HeadBench:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    swap_bytes = 40 * served.config.model.kv.bytes_per_block
    return HeadBench(served, tmp_path_factory.mktemp("head"), {}, swap_bytes=swap_bytes)


compiled = pytest.mark.parametrize("serve", [16], ids=["compiled"], indirect=True)


@compiled
def test_prompt_in_chunks_continues_after_blocks_of_another_request(bench: HeadBench) -> None:
    driver = bench.start(changed(bench.config, long_prefill_token_threshold=20))
    (prompt,) = prompts_of((75,))
    for request_id in (1, 2, 3):
        driver.admit(request_id, [*prompt, request_id], GREEDY)
    driver.run()
    bench.check(20)


@compiled
@pytest.mark.parametrize("length", [5, 26, 33, 45])
def test_choices_continue_after_copied_blocks(length: int, bench: HeadBench) -> None:
    driver = bench.start(changed(bench.config))
    driver.admit(1, prompts_of((length,))[0], msgspec.structs.replace(GREEDY, n=3))
    driver.run()
    bench.check(20)


@compiled
def test_blocks_of_a_request_without_drafts_are_computed_later(bench: HeadBench) -> None:
    driver = bench.start(changed(bench.config))
    (prompt,) = prompts_of((20,))
    speculation = bench.worker._speculation
    assert speculation is not None
    lengths = speculation._lengths
    is_due, lengths.is_due = lengths.is_due, lambda **_: False  # type: ignore[method-assign]
    driver.admit(1, prompt, msgspec.structs.replace(GREEDY, max_tokens=13))
    driver.run()
    assert speculation.drafter.step_time == (0.0, 0.0), "the head has computed something"
    lengths.is_due = is_due  # type: ignore[method-assign]
    driver.admit(2, [*prompt, *driver.outputs[1], 5, 6, 7], GREEDY)
    driver.run()
    assert driver.cached[2] == 32
    bench.check(6)


@compiled
def test_blocks_larger_than_a_step_of_the_head_are_computed_over_several(
    tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]
) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 4}
    bench = HeadBench(served, tmp_path_factory.mktemp("head"), limits)
    assert served.config.model.kv.block_size > 8
    driver = bench.start(bench.config)
    for request_id, prompt in enumerate(prompts_of((45, 14)), 1):
        driver.admit(request_id, prompt, GREEDY)
    driver.run()
    bench.check(8)


@compiled
def test_no_drafts_after_restored_blocks(bench: HeadBench) -> None:
    """Host memory has no keys and values of the head."""
    driver = bench.start(small_kv(changed(bench.config)))
    for request_id, prompt in enumerate(prompts_of((40, 38, 36, 34)), 1):
        driver.admit(request_id, prompt, msgspec.structs.replace(GREEDY, max_tokens=40))
    driver.run()
    assert driver.engine.state is not None and driver.engine.state.counters.swap_in_blocks > 0
    bench.check(10)
