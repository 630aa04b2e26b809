"""Speculative decoding with structured outputs and reasoning budgets: the same tokens and log-probabilities, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher
from tests.models import byte_vocabulary
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.speculation.test_bits import DRAFTS, Oracle, Recorder, drafting_worker
from tests.models.test_engine import changed, small_kv, without_prefix_cache

from quintet.executor.backends.registry import make_worker
from quintet.executor.worker import Worker
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams, Thinking, ThinkingBound
from quintet.wire.structured import StructuredOutputsParams

NUM_TOKENS = 40
OPENS, CLOSES = [11, 12], [13]
"""Marks of reasoning. All tokens are likely enough to be drawn at a high temperature and with a bias."""


def budget(most: int, *, is_open: bool) -> ThinkingBound:
    ways = [Thinking(OPENS, [7, 8, *CLOSES])]
    return ThinkingBound(most, ways, [CLOSES], open_format=0 if is_open else None)


def reasoned(pattern: str) -> StructuredOutputsParams:
    """Return a format that begins after the end of reasoning, as the tokenizer process sends it."""
    return StructuredOutputsParams(
        compiled=LLMatcher.grammar_from_lark(
            f"start: <[0-12,14-93]>{{0,30}} <[13]> answer\nanswer: /{pattern}/"
        )
    )


def requested() -> list[SamplingParams]:
    """Return requests with formats, with reasoning budgets, with both, and plain ones."""
    marks = {OPENS[0]: 5.0, OPENS[1]: 5.0, CLOSES[0]: 2.0}
    more = [
        SamplingParams(
            temperature=1.2, logit_bias=marks, thinking_bound=budget(2, is_open=False), logprobs=1
        ),
        SamplingParams(temperature=1.2, logit_bias=marks, thinking_bound=budget(9, is_open=True)),
        SamplingParams(temperature=0.0, thinking_bound=budget(0, is_open=True)),
        SamplingParams(
            temperature=1.0,
            thinking_bound=budget(5, is_open=True),
            structured_outputs=reasoned(byte_vocabulary.PATTERNS[0]),
            logprobs=0,
        ),
        SamplingParams(temperature=1.0, n=2, structured_outputs=byte_vocabulary.form("(ab|cd){3,9}")),
        SamplingParams(
            temperature=1.0,
            structured_outputs=byte_vocabulary.form("[a-z]{9,30}"),
            stop_token_ids=[70, 71],
            ignore_eos=True,
            logit_bias={66: 3.0},
            frequency_penalty=0.4,
        ),
    ]
    return [
        *byte_vocabulary.requested(NUM_TOKENS),
        *(msgspec.structs.replace(each, seed=i, max_tokens=NUM_TOKENS) for i, each in enumerate(more)),
    ]


def prompt_of(number: int) -> list[int]:
    prompts = prompts_of()
    return prompts[number % len(prompts)]


def run(config: EngineConfig, worker: Any, requests: list[SamplingParams]) -> Recorder:
    driver = Recorder(config, worker)
    for number, params in enumerate(requests):
        driver.admit(10 * number + 10, prompt_of(number), params)
    driver.run()
    return driver


def oracle_worker(config: EngineConfig, plain: Recorder) -> Worker:
    """Return a worker with drafts from an earlier run, one in four of them wrong."""
    worker = drafting_worker(config)
    assert worker._speculation is not None
    sequences = [prompt_of(key // 10 - 1) + outputs for key, outputs in plain.outputs.items()]
    worker._speculation.drafter = Oracle(worker, sequences)
    return worker


def assert_same(config: EngineConfig, plain: Recorder, requests: list[SamplingParams]) -> None:
    """Compare schedules with drafts to a run without."""
    worker = oracle_worker(config, plain)
    variants = {
        "together": config,
        "synchronous": changed(config, max_steps_in_flight=1),
        "in chunks": changed(config, max_num_batched_tokens=17, long_prefill_token_threshold=5),
        "without prefix cache": without_prefix_cache(config),
        "preemption": small_kv(config),
        "two at a time": changed(config, max_num_seqs=2),
    }
    for variant, each in variants.items():
        driver = run(each, worker, requests)
        assert driver.outputs == plain.outputs, variant
        assert driver.endings == plain.endings, variant
        assert driver.logprobs == plain.logprobs, variant
        assert driver.engine.state is not None
        assert driver.engine.state.counters.num_accepted_tokens > 5, variant


@pytest.mark.parametrize("serve", [16], indirect=True)
def test_outputs_are_those_without_drafts(serve: Callable[..., Any], tmp_path: Path) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    config = byte_vocabulary.with_vocabulary(changed(served.config, max_num_seqs=8), tmp_path)
    requests = requested()
    plain = run(config, make_worker(config), requests)
    byte_vocabulary.check({number: plain.outputs[10 * number + 10] for number in range(8)})
    assert_same(changed(config, speculative=DRAFTS), plain, requests)


@pytest.mark.parametrize("serve", [16], indirect=True)
def test_forced_tokens_save_steps_where_the_drafter_proposes_nothing(
    serve: Callable[..., Any], tmp_path: Path
) -> None:
    served = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96)
    config = byte_vocabulary.with_vocabulary(changed(served.config, speculative=DRAFTS), tmp_path)
    worker = drafting_worker(config)
    assert worker._speculation is not None
    worker._speculation.drafter = Oracle(worker, [])
    form = byte_vocabulary.form("Monday|Tuesday|Wednesday")
    driver = run(
        config, worker, [SamplingParams(temperature=1.0, seed=3, max_tokens=40, structured_outputs=form)]
    )
    text = "".join(chr(33 + token) for token in driver.outputs[10][:-1])
    assert text in ("Monday", "Tuesday", "Wednesday")
    assert driver.engine.state is not None
    counters = driver.engine.state.counters
    assert counters.num_accepted_tokens == counters.num_draft_tokens >= len("onday")
