"""Speculative decoding on several ranks: the outputs are those of the same ranks without drafts, bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.models import byte_vocabulary
from tests.models.distributed.ranks import config_of, in_ranks
from tests.models.equality import few_blocks, with_blocks
from tests.models.small_models import prompts_of
from tests.models.speculation.longest_drafts import drafting
from tests.models.speculation.test_bits import DRAFTS, PARAMS, Oracle, Recorder, run, send
from tests.models.speculation.test_draft_model import with_draft
from tests.models.speculation.test_structured import prompt_of
from tests.models.speculation.test_structured import run as run_requests
from tests.models.test_engine import changed
from tests.models.test_equal import ROWS, made

from quintet.executor.backends.registry import make_worker
from quintet.executor.context import RankMemory
from quintet.executor.distributed.parallel.pipeline_worker import PipelineWorker
from quintet.executor.worker import Worker
from quintet.wire.config import EngineConfig, SpeculativeConfig
from quintet.wire.errors import ConfigError


def with_drafts(config: EngineConfig, drafts: SpeculativeConfig = DRAFTS) -> EngineConfig:
    scheduler = msgspec.structs.replace(config.scheduler, speculative=drafts)
    return msgspec.structs.replace(config, scheduler=scheduler)


PROMPTS = {10 * index + 10: prompt for index, prompt in enumerate(prompts_of((1, 8, 29, 50)))}
"""Prompts of `run`, by request id."""


def use_oracle_drafts(
    worker: Worker | PipelineWorker, prompts: dict[int, list[int]], plain: Recorder
) -> None:
    """Propose the tokens of an earlier run without choices, as many as allowed."""
    speculation = worker._speculation
    assert speculation is not None
    sequences = [prompt + plain.outputs[key] for key, prompt in prompts.items()]
    speculation.drafter = Oracle(worker, sequences)
    drafting(worker)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("params", ["sampled", "penalties", "logprobs"])
@pytest.mark.parametrize(
    ("name", "size", "context"), [("llama", 2, 1), ("mixtral", 2, 1), ("llama", 4, 2), ("qwen 3.5", 2, 1)]
)
def test_ranks_have_the_outputs_without_drafts(
    name: str, size: int, context: int, params: str, tmp_path: Path
) -> None:
    """Also of ranks that share KV memory, and of ranks with recurrent states."""
    made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, size, context=context, change=with_drafts) as loaded:
        worker = loaded.worker
        assert isinstance(worker, Worker)
        plain = run(changed(loaded.config, speculative=None), worker, PARAMS[params])
        use_oracle_drafts(worker, PROMPTS, plain)
        config = changed(loaded.config)
        for each in (config, with_blocks(config, few_blocks(config))):
            driver = run(each, worker, PARAMS[params])
            assert driver.outputs == plain.outputs and driver.logprobs == plain.logprobs
            assert driver.engine.state is not None
            assert driver.engine.state.counters.num_accepted_tokens > 5


@pytest.mark.drawn(2)
@pytest.mark.parametrize("params", ["sampled", "penalties", "logprobs"])
@pytest.mark.parametrize(("name", "stages", "size"), [("llama", 2, 1), ("llama", 3, 1), ("gemma3", 2, 2)])
def test_stages_have_the_outputs_without_drafts(
    name: str, stages: int, size: int, params: str, tmp_path: Path
) -> None:
    made(ROWS[name], tmp_path)
    with in_ranks(tmp_path, size, stages=stages, change=with_drafts) as loaded:
        worker: Any = loaded.worker
        assert isinstance(worker, PipelineWorker)
        plain = run(changed(loaded.config, speculative=None), worker, PARAMS[params])
        use_oracle_drafts(worker, PROMPTS, plain)
        config = changed(loaded.config)
        for each in (config, with_blocks(config, few_blocks(config))):
            driver = run(each, worker, PARAMS[params])
            assert driver.outputs == plain.outputs and driver.logprobs == plain.logprobs
            assert driver.engine.state is not None
            assert driver.engine.state.counters.num_accepted_tokens > 5


@pytest.mark.drawn(2)
@pytest.mark.parametrize("params", ["sampled", "penalties", "logprobs"])
@pytest.mark.parametrize(
    ("size", "context", "stages", "hosts"),
    [(2, 1, 1, 1), (4, 2, 1, 1), (1, 1, 2, 1), (2, 1, 2, 1), (2, 1, 1, 2), (1, 1, 2, 2)],
)
def test_draft_model_changes_no_output_of_ranks(
    size: int, context: int, stages: int, hosts: int, params: str, tmp_path: Path
) -> None:
    """The draft model is the served model, computed whole in rank 0 of the first stage."""
    made(ROWS["llama"], tmp_path)
    alone = config_of(tmp_path, 1, 1, "float32", "none", "auto", None, experts=False)
    change = partial(with_draft, draft=alone)
    with in_ranks(tmp_path, size, context=context, stages=stages, hosts=hosts, change=change) as loaded:
        worker: Any = loaded.worker
        plain = run(changed(loaded.config, speculative=None), worker, PARAMS[params])
        drafting(worker)
        config = changed(loaded.config)
        for each in (config, with_blocks(config, few_blocks(config))):
            driver = run(each, worker, PARAMS[params])
            assert driver.outputs == plain.outputs and driver.logprobs == plain.logprobs
            assert driver.engine.state is not None
            counters = driver.engine.state.counters
            assert counters.num_accepted_tokens > 5
            if params == "sampled":
                assert counters.num_accepted_tokens > 0.8 * counters.num_draft_tokens


@pytest.mark.parametrize("stages", [2, 3])
def test_stages_have_the_structured_outputs_without_drafts(stages: int, tmp_path: Path) -> None:
    """Several formats, so that a step has masks for several draws of several slots."""
    made(ROWS["llama"], tmp_path)

    def change(config: EngineConfig) -> EngineConfig:
        return byte_vocabulary.with_vocabulary(with_drafts(config), tmp_path)

    with in_ranks(tmp_path, 1, stages=stages, change=change) as loaded:
        worker: Any = loaded.worker
        requests = byte_vocabulary.requested()
        plain = run_requests(changed(loaded.config, speculative=None), worker, requests)
        byte_vocabulary.check({number: plain.outputs[10 * number + 10] for number in range(len(requests))})
        use_oracle_drafts(worker, {key: prompt_of(key // 10 - 1) for key in plain.outputs}, plain)
        driver = run_requests(changed(loaded.config), worker, requests)
        assert driver.outputs == plain.outputs and driver.endings == plain.endings
        assert driver.logprobs == plain.logprobs
        assert driver.engine.state is not None
        assert driver.engine.state.counters.num_accepted_tokens > 5


def test_stages_draft_the_outputs_of_earlier_requests(tmp_path: Path) -> None:
    """Suffix decoding: a request that is sent again verifies its earlier output."""
    made(ROWS["llama"], tmp_path)
    suffix = SpeculativeConfig(method="suffix", num_speculative_tokens=6, suffix_decoding_corpus_tokens=1024)
    with in_ranks(tmp_path, 1, stages=2, change=partial(with_drafts, drafts=suffix)) as loaded:
        worker: Any = loaded.worker
        plain = run(changed(loaded.config, speculative=None), worker, PARAMS["sampled"])
        drafting(worker)
        driver = Recorder(changed(loaded.config), worker)
        for first in (0, 100):
            send(driver, PARAMS["sampled"], first)
            assert {key: driver.outputs[first + key] for key in plain.outputs} == plain.outputs
        assert worker.output_cache.num_requests >= len(plain.outputs)
        assert driver.engine.state is not None
        assert driver.engine.state.counters.num_accepted_tokens > 20


def test_stages_with_recurrent_states_are_refused(tmp_path: Path) -> None:
    made(ROWS["mamba"], tmp_path)
    config = with_drafts(config_of(tmp_path, 1, 2, "float32", "none", "auto", None, experts=False))
    with pytest.raises(ConfigError, match="recurrent states"):
        make_worker(config, memory=RankMemory(links=(0, 0)))
