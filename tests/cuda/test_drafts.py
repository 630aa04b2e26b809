"""Speculative decoding on a device: with ``--batch-invariant``, tokens and bits are those without drafts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from tests.cuda.device_ranks import leading_worker
from tests.cuda.test_device_ranks import KINDS as RANK_KINDS
from tests.cuda.test_device_ranks import rank_config
from tests.cuda.test_worker import worker_on
from tests.cuda.test_worker_bits import invariant_config
from tests.gpu.small import with_blocks, with_scheduler
from tests.models import byte_vocabulary
from tests.models.random_checkpoints import write_checkpoint
from tests.models.small_models import prompts_of
from tests.models.speculation.longest_drafts import drafting
from tests.models.speculation.test_bits import Oracle, Recorder
from tests.models.speculation.test_random_traces import check_any_schedule
from tests.models.test_engine import changed

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.graphs import GraphSize
from quintet.executor.backends.cuda.runner import DecodeGraph
from quintet.executor.backends.cuda.worker import DeviceWorker
from quintet.executor.sampling import grammar
from quintet.wire.config import EngineConfig, SpeculativeConfig
from quintet.wire.messages import FinishReason
from quintet.wire.params import SamplingParams
from quintet.wire.step import StepPlan

DRAFTS = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_min=1)
NUM_TOKENS = 14
REQUESTS = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.95, top_k=50, min_p=0.01),
    SamplingParams(temperature=0.7, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, stop_token_ids=list(range(0, 200, 9)), logit_bias={5: 4.0}, logprobs=0),
    SamplingParams(temperature=1.0, structured_outputs=byte_vocabulary.form(byte_vocabulary.PATTERNS[2])),
)
LENGTHS = (1, 8, 16, 29, 50)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    config = with_scheduler(invariant_config(tmp_path), max_num_seqs=8, max_num_batched_tokens=64)
    return byte_vocabulary.with_vocabulary(config, tmp_path)


def run(
    config: EngineConfig, worker: DeviceWorker, requests: Sequence[SamplingParams] = REQUESTS
) -> Recorder:
    driver = Recorder(config, worker)
    for index, (prompt, params) in enumerate(zip(prompts_of(LENGTHS), requests, strict=True)):
        driver.admit(index, prompt, msgspec.structs.replace(params, seed=index, max_tokens=NUM_TOKENS))
    driver.run()
    return driver


def oracle(worker: DeviceWorker, plain: Recorder) -> DeviceWorker:
    """Make a worker verify the tokens of an earlier run, one in four of them wrong."""
    drafting(worker)
    assert worker._speculation is not None
    sequences = [
        prompt + plain.outputs[index]
        for index, prompt in enumerate(prompts_of(LENGTHS))
        if index in plain.outputs
    ]
    worker._speculation.drafter = Oracle(worker, sequences)
    return worker


def assert_same(found: Recorder, plain: Recorder, variant: str) -> None:
    assert found.outputs == plain.outputs, variant
    assert found.endings == plain.endings, variant
    assert found.logprobs == plain.logprobs, variant


def test_outputs_are_those_without_drafts(config: EngineConfig, device: Device) -> None:
    plain = run(config, worker_on(device, config))
    drafted = with_scheduler(config, speculative=DRAFTS)
    worker = oracle(worker_on(device, drafted), plain)
    graphs, sizes = worker.steps.graphs, set[int]()
    assert graphs is not None
    find = graphs.find

    def watched(size: GraphSize) -> DecodeGraph | None:
        graph = find(size)
        if graph is not None:
            sizes.add(graph.size.max_count)
        return graph

    with mock.patch.object(graphs, "find", watched):
        driver = run(drafted, worker)
    assert_same(driver, plain, "together")
    assert driver.engine.state is not None and driver.engine.state.counters.num_accepted_tokens > 5
    assert 1 + DRAFTS.num_speculative_tokens in sizes, "steps with drafts replay graphs"


@pytest.mark.whole
@pytest.mark.parametrize("captured", [True, False])
def test_outputs_in_other_schedules(captured: bool, config: EngineConfig, device: Device) -> None:
    plain = run(config, worker_on(device, config))
    drafted = with_scheduler(config, speculative=DRAFTS)
    worker = oracle(worker_on(device, drafted, captured=captured), plain)
    variants = {
        "one in flight": with_scheduler(drafted, max_steps_in_flight=1),
        "three in flight": with_scheduler(drafted, max_steps_in_flight=3),
        "preemption": with_blocks(drafted, 8),
        "three at a time, in chunks": with_scheduler(drafted, max_num_seqs=3, max_num_batched_tokens=17),
    }
    for variant, each in variants.items():
        assert_same(run(each, worker), plain, variant)


def test_steps_without_drafts_overlap(config: EngineConfig, device: Device) -> None:
    """Only steps with drafts, and those after them, wait for tokens."""
    drafted = with_scheduler(config, speculative=DRAFTS)
    worker = worker_on(device, drafted, captured=False)
    assert worker._speculation is not None
    lengths = worker._speculation._lengths
    lengths.is_due = lambda **_: False  # type: ignore[method-assign]
    num_waits, waits_for = 0, worker.waits_for

    def watched(plan: StepPlan) -> bool:
        nonlocal num_waits
        waits = waits_for(plan)
        num_waits += waits
        return waits

    with mock.patch.object(worker, "waits_for", watched):
        plain = run(drafted, worker)
        assert num_waits == 0
        assert plain.engine.state is not None and plain.engine.state.counters.num_draft_tokens == 0
        del lengths.is_due
        oracle(worker, plain)
        assert_same(run(drafted, worker), plain, "with drafts")
    assert num_waits > 5


@pytest.mark.whole
@pytest.mark.parametrize("seed", range(4))
def test_any_request_in_any_schedule(seed: int, config: EngineConfig, device: Device) -> None:
    rng = random.Random(seed)
    config = with_scheduler(config, max_num_seqs=8)
    speculative = msgspec.structs.replace(DRAFTS, method=rng.choice(["ngram", "suffix"]))
    drafted = with_scheduler(config, speculative=speculative)
    captured = rng.random() < 0.5

    def make(config: EngineConfig) -> DeviceWorker:
        return worker_on(device, config, captured=captured)

    check_any_schedule(rng, config, drafted, make)


def test_step_without_memory_is_repeated_without_drafts(config: EngineConfig, device: Device) -> None:
    plain = run(config, worker_on(device, config, captured=False))
    drafted = with_scheduler(config, speculative=DRAFTS)
    worker = oracle(worker_on(device, drafted, captured=False), plain)
    compute = worker.runner.compute

    def scarce(staging: torch.Tensor, num_rows: int, num_tokens: int, *sizes: Any) -> Any:
        if num_tokens > 12:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(staging, num_rows, num_tokens, *sizes)

    with mock.patch.object(worker.runner, "compute", scarce):
        assert_same(run(drafted, worker), plain, "with little memory")
    assert worker.num_split > 0


def test_grammar_that_fails_after_an_accepted_draft_fails_the_request(
    config: EngineConfig, device: Device
) -> None:
    """As a grammar that exceeds a limit of its library: no token is allowed after the first six."""
    is_stuck = grammar._is_stuck

    def with_a_limit(matcher: Any, words: Any) -> bool:
        forced = matcher.compute_ff_tokens()
        return is_stuck(matcher, words) or 0 < len(forced) <= 10

    params = SamplingParams(seed=1, structured_outputs=byte_vocabulary.form("abcdefghijklmnop[a-z]{3}"))
    endings = []
    with mock.patch.object(grammar, "_is_stuck", with_a_limit):
        for each in (config, with_scheduler(config, speculative=DRAFTS)):
            worker = worker_on(device, each, captured=False)
            driver = Recorder(each, worker if each is config else drafting(worker))
            driver.admit(1, prompts_of((9,))[0], params)
            driver.run()
            endings.append((driver.outputs.get(1), driver.endings[1]))
    assert endings[0] == endings[1] and endings[0][1] is FinishReason.ERROR
    assert driver.engine.state is not None and driver.engine.state.counters.num_accepted_tokens > 0


def test_ended_grammar_forces_no_tokens(config: EngineConfig, device: Device) -> None:
    """Otherwise each later step would wait for the tokens of the one before."""
    drafted = with_scheduler(config, speculative=DRAFTS)
    worker = worker_on(device, drafted, captured=False)
    assert worker._speculation is not None
    driver = Recorder(drafted, worker)
    driver.admit(1, prompts_of((3,))[0], msgspec.structs.replace(REQUESTS[4], max_tokens=2, seed=0))
    driver.run()
    assert worker._speculation._grammars.is_used
    driver.admit(2, prompts_of((8,))[0], SamplingParams(max_tokens=2, seed=0))
    driver.run()
    assert not worker._speculation._grammars.is_used


@pytest.mark.whole
def test_drafts_of_several_ranks(tmp_path: Path) -> None:
    """Ranks replay graphs of the same sizes; only rank 0 knows the drafts."""
    write_checkpoint(RANK_KINDS["llama"], tmp_path)
    config = changed(rank_config(tmp_path, batch_invariant=True), max_num_seqs=4, max_num_batched_tokens=64)
    config = byte_vocabulary.with_vocabulary(config, tmp_path)
    with leading_worker(config) as worker:
        plain = run(config, worker)
    drafted = with_scheduler(config, speculative=DRAFTS)
    with leading_worker(drafted) as worker:
        assert_same(run(drafted, oracle(worker, plain)), plain, "with drafts")
