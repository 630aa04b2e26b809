"""Speculative decoding with real models: tokens and log-probabilities are those without it, bit for bit.

An oracle proposes the tokens that follow, some of them wrong, so that all numbers of accepted drafts occur.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.speculation.longest_drafts import drafting
from tests.models.test_engine import CoreAndWorker, changed, small_kv

from quintet.core.token_messages import StepMessages
from quintet.executor.backends.registry import make_worker
from quintet.executor.interface import StepWorker
from quintet.executor.memory import Bits
from quintet.executor.speculation.drafters import DraftRows
from quintet.executor.speculation.gram_index import Tokens
from quintet.executor.worker import Worker
from quintet.wire.codec import unpack_i64
from quintet.wire.config import EngineConfig, SpeculativeConfig
from quintet.wire.errors import ConfigError
from quintet.wire.params import SamplingParams
from quintet.wire.step import StepPlan

compiled = pytest.mark.parametrize("serve", [16], ids=["compiled"], indirect=True)
DRAFTS = SpeculativeConfig(num_speculative_tokens=6)
NUM_TOKENS = 40
PARAMS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(temperature=0.0),
    "sampled": SamplingParams(temperature=1.0, top_p=0.95, top_k=50, min_p=0.01),
    "penalties": SamplingParams(
        temperature=0.7, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3
    ),
    "biased": SamplingParams(temperature=1.0, logit_bias={5: 4.0, 9: -100.0}, min_tokens=20),
    "logprobs": SamplingParams(temperature=1.0, logprobs=3, prompt_logprobs=2),
    "stops": SamplingParams(temperature=1.0, stop_token_ids=list(range(0, 200, 9)), logprobs=0),
    "choices": SamplingParams(temperature=1.0, n=3),
}


class Recorder(CoreAndWorker):
    """Also records log-probabilities."""

    def __init__(self, config: EngineConfig, worker: StepWorker) -> None:
        self.logprobs: dict[int, list[tuple[int, bytes, bytes]]] = {}
        super().__init__(config, worker)

    def _apply(self, effects: StepMessages) -> None:
        super()._apply(effects)
        for _, tokens in effects.tokens:
            request_ids = unpack_i64(tokens.request_ids)
            for entry in tokens.logprobs:
                known = self.logprobs.setdefault(request_ids[entry.row], [])
                known.append((entry.rank, entry.token_ids, entry.logprobs))


class Oracle:
    """Proposes the tokens of known sequences; one draft in four is wrong."""

    def __init__(self, worker: Any, sequences: list[list[int]]) -> None:
        self._token_ids = worker._speculation._token_ids
        self.step_time = (0.0, 0.0)
        self._sequences = sequences
        self._rng = random.Random(0)

    output_cache = None
    reads_steps = False

    def end(self, slot: int, num_tokens: int) -> None:
        pass

    def note(self, plan: StepPlan) -> None:
        pass

    def observe(self, num_tokens: int) -> Bits:
        raise NotImplementedError

    def note_computed(self, *_: object) -> None:
        pass

    def num_missing(self, *_: object) -> None:
        pass

    def propose(self, rows: DraftRows) -> list[Tokens]:
        columns = (rows.slots.tolist(), rows.num_tokens.tolist(), rows.counts.tolist())
        return [
            self._proposal(self._token_ids[slot, :num_tokens].tolist(), most)
            for slot, num_tokens, most in zip(*columns, strict=True)
        ]

    def _proposal(self, known: list[int], most: int) -> Tokens:
        drafts = next((s[len(known) :] for s in self._sequences if s[: len(known)] == known), [])
        drafts = [token if self._rng.random() < 0.75 else (token + 1) % 200 for token in drafts[:most]]
        return np.array(drafts, np.int32)


def drafting_worker(config: EngineConfig) -> Worker:
    """Return a worker that proposes as many drafts as allowed."""
    worker = make_worker(config)
    assert isinstance(worker, Worker)
    drafting(worker)
    return worker


def run(config: EngineConfig, worker: Worker, params: SamplingParams) -> Recorder:
    driver = Recorder(config, worker)
    send(driver, params)
    return driver


def send(driver: Recorder, params: SamplingParams, first: int = 0) -> None:
    """Run four requests; their ids are ``first`` + 10, 20, 30 and 40."""
    for index, prompt in enumerate(prompts_of((1, 8, 29, 50))):
        seeded = msgspec.structs.replace(params, seed=index, max_tokens=NUM_TOKENS)
        driver.admit(first + 10 * index + 10, prompt, seeded)
    driver.run()


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("family", ["qwen3", "mistral-window", "llama-gqa-biases"])
@compiled
def test_outputs_are_those_without_drafts(family: str, name: str, serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES[family](), max_model_len=96)
    plain = run(changed(served.config), served.core.worker, PARAMS[name])
    sequences = [
        prompt + plain.outputs[10 * index + 10 + choice]
        for index, prompt in enumerate(prompts_of((1, 8, 29, 50)))
        for choice in range(PARAMS[name].n)
    ]
    config = changed(served.config, speculative=DRAFTS)
    worker = drafting_worker(config)
    assert worker._speculation is not None
    worker._speculation.drafter = Oracle(worker, sequences)
    variants = {
        "together": config,
        "synchronous": changed(config, max_steps_in_flight=1),
        "three in flight": changed(config, max_steps_in_flight=3),
        "preemption": small_kv(config),
        "two at a time": changed(config, max_num_seqs=2),
    }
    for variant, each in variants.items():
        driver = run(each, worker, PARAMS[name])
        assert driver.outputs == plain.outputs, variant
        assert driver.endings == plain.endings, variant
        assert driver.logprobs == plain.logprobs, variant
        assert driver.engine.state is not None
        assert driver.engine.state.counters.num_accepted_tokens > 5, variant


@pytest.mark.parametrize("serve", [4], indirect=True)
def test_models_that_only_torch_can_compute_are_refused(serve: Callable[..., Any]) -> None:
    config = serve(FAMILIES["qwen3"](), max_model_len=96).config
    with pytest.raises(
        ConfigError, match=r"--speculative-config .* only torch can compute .* drop it.* block size 4"
    ):
        make_worker(changed(config, speculative=DRAFTS))


@compiled
def test_ngram_drafts_of_a_repetitive_text_are_accepted(serve: Callable[..., Any]) -> None:
    served = serve(FAMILIES["qwen3"](), max_model_len=256)
    config = changed(
        served.config, speculative=SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1)
    )
    params = SamplingParams(temperature=0.0, logit_bias={7: 30.0}, max_tokens=60, seed=0)
    driver = CoreAndWorker(config, drafting_worker(config))
    driver.admit(1, prompts_of((20,))[0], params)
    driver.run()
    assert driver.engine.state is not None
    counters = driver.engine.state.counters
    assert driver.outputs[1] == [7] * 60
    assert counters.steps < 20 and counters.num_accepted_tokens > 40


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("family", ["qwen3", "mistral-window", "llama-gqa-biases"])
@compiled
def test_suffix_decoding_changes_no_output(family: str, name: str, serve: Callable[..., Any]) -> None:
    """Requests are sent again, so that their earlier outputs are drafted. A new worker has an empty cache."""
    served = serve(FAMILIES[family](), max_model_len=96)
    plain = run(changed(served.config), served.core.worker, PARAMS[name])
    drafts = SpeculativeConfig(
        method="suffix",
        num_speculative_tokens=6,
        suffix_decoding_max_spec_factor=3.0,
        suffix_decoding_corpus_tokens=500,
    )
    config = changed(served.config, speculative=drafts)
    for each in (config, small_kv(config)):
        worker = drafting_worker(config)
        driver = Recorder(each, worker)
        for first in (0, 100, 200):
            send(driver, PARAMS[name], first)
            for request_id, output in plain.outputs.items():
                again = first + request_id
                assert driver.outputs[again] == output and driver.endings[again] == plain.endings[request_id]
                assert driver.logprobs.get(again) == plain.logprobs.get(request_id)
        assert driver.engine.state is not None
        assert driver.engine.state.counters.num_accepted_tokens > 20
        cache = worker.output_cache
        assert cache is not None and cache.num_requests > 0
