"""The real core over the real worker, in one process: transformers' tokens in every schedule."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
from tests.models.small_models import FAMILIES, prompts_of

from quintet.core.engine import Engine
from quintet.core.token_messages import StepMessages
from quintet.executor.backends.registry import make_worker
from quintet.executor.interface import Pending, StepWorker
from quintet.executor.kv_transfer.back_end import BackEnd
from quintet.wire.codec import pack_i32, unpack_i32, unpack_i64
from quintet.wire.config import EngineConfig
from quintet.wire.embeds import EmbedsPrompt, EmbedsSpan, digest_of
from quintet.wire.kv_tiers import KvTierResults
from quintet.wire.messages import Admit, FinishReason
from quintet.wire.params import SamplingParams
from quintet.wire.pooling import PoolingType
from quintet.wire.request import KvTransfer, RequestSpec
from quintet.wire.step import Capacity, StepPlan

NUM_TOKENS = 32
TINY_KV = {4: 34, 16: 9}
"""Blocks by block size that force eight requests to be preempted: the longest one needs 21 or 6 of them."""


class CoreAndWorker:
    """A core and a worker, with the queue of plans between them."""

    def __init__(self, config: EngineConfig, worker: StepWorker | None = None) -> None:
        self.engine = Engine(config.model, config.cache, config.scheduler, prompt_embeds=True)
        self.worker = worker or make_worker(config)
        self.worker.reset()
        self._pending: deque[Pending] = deque()
        self.block_size = config.model.kv.block_size
        self.outputs: dict[int, list[int]] = {}
        self.endings: dict[int, FinishReason] = {}
        self.cached: dict[int, int] = {}
        self.vectors: dict[int, bytes] = {}
        num_blocks = config.cache.memory_bytes // config.model.kv.bytes_per_block
        limits = (config.scheduler.max_num_seqs, config.model.max_model_len)
        capacity = Capacity(1, num_blocks, self.block_size, *limits)
        capacity.num_host_blocks = self.worker.num_host_blocks
        self._rung = threading.Event()
        self._introduce_back_ends(capacity)
        self._apply(self.engine.capacity(capacity, 0))

    def admit(
        self,
        request_id: int,
        prompt: list[int] | EmbedsPrompt | tuple[list[int], list[EmbedsSpan]],
        params: SamplingParams,
        priority: int = 0,
        kv_transfer: KvTransfer | None = None,
        pooling: PoolingType | None = None,
        adapter: bytes = b"",
    ) -> None:
        """prompt: ids, embeddings, or ids with spans of embeddings."""
        if isinstance(prompt, EmbedsPrompt):
            prompt = [0] * prompt.span.num_tokens, [prompt.span]
        ids, spans = (prompt, []) if isinstance(prompt, list) else prompt
        embeds = [msgspec.structs.replace(span, digest=digest_of(span)) for span in spans]
        spec = RequestSpec(
            params, 0, 0, priority=priority, kv_transfer=kv_transfer, pooling=pooling, adapter=adapter
        )
        admit = Admit(request_id, pack_i32(ids), spec, 0, embeds=embeds)
        self._apply(self.engine.admit(admit, 0))

    def run(self) -> None:
        """Run until all requests are done, planning ahead up to the configured depth."""
        plans: list[StepPlan] = []
        while self.engine.num_live:
            self._order(plans)
            while (plan := self.engine.plan(0)) is not None:
                plans.append(plan)
                self._order(plans)
            self._order(plans)
            if self._back_ends and not (plans or self._pending):
                self.receive_disk_answer()
                continue
            assert plans or self._pending, "requests are unfinished and no plan was made"
            self._begin(plans)
            self._apply(self.engine.commit(self._pending.popleft().result(), 0))
        self._begin(plans)
        while self._pending:
            self._apply(self.engine.commit(self._pending.popleft().result(), 0))

    @property
    def _back_ends(self) -> Sequence[BackEnd]:
        return () if self.worker.kv is None else self.worker.kv.back_ends

    def _introduce_back_ends(self, capacity: Capacity) -> None:
        for each in self._back_ends:
            each.begin(self._rung.set)
            capacity.tiers.append(each.capacity)
            self.engine.kv_results(KvTierResults(1, 0, each.tier, each.stored()))

    def _order(self, plans: list[StepPlan]) -> None:
        """Send the worker the transfers that follow the previous plans."""
        for requests in self.engine.kv_requests(0):
            self._begin(plans)
            assert self.worker.kv is not None
            self.worker.kv.order(requests)

    def run_disk_operations(self) -> None:
        """Run the disk operations that follow the last plan."""
        self._order([])

    def receive_disk_answer(self) -> None:
        """Wait for an answer of the disk."""
        assert self._rung.wait(60.0), "no answer"
        self._rung.clear()
        for each in self._back_ends:
            results = each.take_results()
            if results is not None:
                results.executor_epoch = 1
                self.engine.kv_results(results)

    def _begin(self, plans: list[StepPlan]) -> None:
        """Begin all plans: a worker with overlap has them in flight together."""
        self._pending.extend(self.worker.begin(plan) for plan in plans)
        plans.clear()

    def _apply(self, effects: StepMessages) -> None:
        assert not effects.failed, effects.failed
        for pooled in effects.pooled:
            assert pooled.request_id not in self.vectors
            self.vectors[pooled.request_id] = pooled.vector
            self.cached[pooled.request_id] = pooled.num_cached_tokens
        for _, tokens in effects.tokens:
            for opened in tokens.opens:
                self.cached[opened.request_id] = opened.num_cached_tokens
            ids = list(unpack_i32(tokens.token_ids))
            rows = zip(
                unpack_i64(tokens.request_ids),
                unpack_i32(tokens.first_indexes),
                tokens.num_tokens,
                tokens.finishes,
                strict=True,
            )
            for request_id, first, count, finish in rows:
                known = self.outputs.setdefault(request_id, [])
                assert first == len(known), "a token is missing or duplicated"
                known += ids[:count]
                del ids[:count]
                if finish:
                    assert request_id not in self.endings
                    self.endings[request_id] = FinishReason(finish)


def changed(config: EngineConfig, **scheduler: Any) -> EngineConfig:
    """Return the configuration with other scheduler settings, audited after every step."""
    return msgspec.structs.replace(
        config, scheduler=msgspec.structs.replace(config.scheduler, audit=True, **scheduler)
    )


def small_kv(config: EngineConfig) -> EngineConfig:
    """Return the configuration with `TINY_KV`."""
    kv = config.model.kv
    cache = msgspec.structs.replace(config.cache, memory_bytes=TINY_KV[kv.block_size] * kv.bytes_per_block)
    return msgspec.structs.replace(config, cache=cache)


def without_prefix_cache(config: EngineConfig) -> EngineConfig:
    """Return the configuration with the prefix cache off."""
    return msgspec.structs.replace(
        config, cache=msgspec.structs.replace(config.cache, enable_prefix_caching=False)
    )


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0)


@pytest.mark.drawn(3)  # `test_equal` has every family
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_do_not_depend_on_scheduling(family: str, serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES[family](), max_model_len=96)
    prompts = prompts_of()
    expected = served.greedy(prompts, NUM_TOKENS)
    config, worker = served.config, served.core.worker
    variants = {
        "together": changed(config),
        "synchronous": changed(config, max_steps_in_flight=1),
        "chunks": changed(config, max_num_batched_tokens=17, long_prefill_token_threshold=5),
        "whole prompts": changed(config, enable_chunked_prefill=False, max_num_batched_tokens=64),
        "no prefix cache": without_prefix_cache(changed(config)),
        "two at a time": changed(config, max_num_seqs=2),
        "preemption": small_kv(changed(config)),
        "preemption in chunks": small_kv(changed(config, max_num_batched_tokens=13)),
    }
    for name, variant in variants.items():
        driver = CoreAndWorker(variant, worker)
        for i, prompt in enumerate(prompts):
            driver.admit(i + 1, prompt, GREEDY)
        driver.run()
        assert [driver.outputs[i + 1] for i in range(len(prompts))] == expected, name
        assert driver.engine.state is not None
        preempted = driver.engine.state.counters.preemptions
        assert (preempted > 0) == name.startswith("preemption"), (name, preempted)


def test_second_round_hits_the_prefix_cache_with_the_same_tokens(serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    driver = CoreAndWorker(changed(served.config), served.core.worker)
    prompts = prompts_of()
    for round_ in (0, 100):
        for i, prompt in enumerate(prompts):
            driver.admit(round_ + i + 1, prompt, GREEDY)
        driver.run()
    expected = served.greedy(prompts, NUM_TOKENS)
    for i, (prompt, outputs) in enumerate(zip(prompts, expected, strict=True)):
        assert driver.outputs[i + 1] == driver.outputs[100 + i + 1] == outputs
        assert driver.cached[100 + i + 1] == (len(prompt) - 1) // driver.block_size * driver.block_size


def test_four_choices_equal_four_requests_with_their_seeds(serve: Callable[..., Any]) -> None:
    """Choices that share a prompt's blocks draw the tokens of separate requests."""
    from quintet.wire.params import seed_of_choice

    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    driver = CoreAndWorker(changed(served.config), served.core.worker)
    prompts = prompts_of((5, 29))
    for i, prompt in enumerate(prompts):
        driver.admit(
            10 * i + 10, prompt, SamplingParams(n=4, temperature=0.9, top_p=0.95, max_tokens=24, seed=7)
        )
    driver.run()
    alone = CoreAndWorker(without_prefix_cache(changed(served.config)), served.core.worker)
    for i, prompt in enumerate(prompts):
        for choice in range(4):
            params = SamplingParams(
                temperature=0.9, top_p=0.95, max_tokens=24, seed=seed_of_choice(7, choice)
            )
            alone.admit(10 * i + 10 + choice, prompt, params)
            alone.run()
    assert driver.outputs == alone.outputs
    assert len({tuple(output) for output in driver.outputs.values()}) == 8


def test_preempted_choices_draw_the_same(serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES["qwen2"](), max_model_len=96)
    params = SamplingParams(
        n=4, temperature=1.0, max_tokens=30, seed=3, presence_penalty=0.5, repetition_penalty=1.2
    )
    outputs = []
    for config in (changed(served.config), small_kv(changed(served.config))):
        driver = CoreAndWorker(config, served.core.worker)
        for i, prompt in enumerate(prompts_of((13, 29, 20))):
            driver.admit(10 * i + 10, prompt, params)
        driver.run()
        outputs.append(driver.outputs)
    assert outputs[0] == outputs[1]
