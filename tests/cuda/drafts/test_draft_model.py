"""Draft models on a device: outputs are those without drafts, and drafts of the served model itself are accepted."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.cuda.device_ranks import leading_worker
from tests.cuda.test_device_ranks import KINDS as RANK_KINDS
from tests.cuda.test_device_ranks import rank_config
from tests.cuda.test_drafts import assert_same, run
from tests.cuda.test_worker import worker_on
from tests.cuda.test_worker_bits import invariant_config
from tests.gpu.small import HF_CONFIG, SMALLER, with_blocks, with_scheduler
from tests.models import byte_vocabulary
from tests.models.conftest import engine_config
from tests.models.random_checkpoints import write_checkpoint
from tests.models.speculation.longest_drafts import drafting
from tests.models.speculation.test_bits import Recorder
from tests.models.speculation.test_draft_model import with_draft
from tests.models.test_engine import changed

from quintet.core.counters import Counters
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.worker import DeviceWorker
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams

UNMASKED = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.95, top_k=50, min_p=0.01),
    SamplingParams(temperature=0.7, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, logit_bias={5: 4.0}, logprobs=0),
    SamplingParams(temperature=0.9),
)


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    config = with_scheduler(invariant_config(tmp_path), max_num_seqs=8, max_num_batched_tokens=64)
    return byte_vocabulary.with_vocabulary(config, tmp_path)


@pytest.fixture
def other(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """Return a model of one layer with other weights."""
    folder = tmp_path_factory.mktemp("draft")
    hf_config = HF_CONFIG | SMALLER | {"head_dim": 32, "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(hf_config))
    return engine_config(folder, hf_config, 16, 128, "bfloat16")


def drafting_on(device: Device, config: EngineConfig, **options: Any) -> DeviceWorker:
    worker: DeviceWorker = drafting(worker_on(device, config, **options))
    return worker


def counters_of(driver: Recorder) -> Counters:
    assert driver.engine.state is not None
    return driver.engine.state.counters


@pytest.mark.parametrize("captured", [True, False])
def test_outputs_are_those_without_drafts(
    captured: bool, config: EngineConfig, other: EngineConfig, device: Device
) -> None:
    plain = run(config, worker_on(device, config, captured=False))
    drafted = with_draft(config, other)
    worker = drafting_on(device, drafted, captured=captured)
    variants = {
        "together": drafted,
        "one in flight": with_scheduler(drafted, max_steps_in_flight=1),
        "preemption": with_blocks(drafted, 6),
        "three at a time, in chunks": with_scheduler(drafted, max_num_seqs=3, max_num_batched_tokens=17),
    }
    for variant, each in variants.items():
        driver = run(each, worker)
        assert_same(driver, plain, variant)
        assert counters_of(driver).num_draft_tokens > 50, variant


def test_drafts_of_the_served_model_itself_are_accepted(config: EngineConfig, device: Device) -> None:
    """A wrong key, value, block or token, or a draw with another random number, would reject some."""
    drafted = with_draft(config, config)
    worker = drafting_on(device, drafted)
    for variant, each in {
        "together": drafted,
        "preemption": with_blocks(drafted, 6),
        "two at a time": with_scheduler(drafted, max_num_seqs=2),
    }.items():
        counters = counters_of(run(each, worker, UNMASKED))
        assert counters.num_draft_tokens == counters.num_accepted_tokens > 30, variant
        assert (counters.preemptions > 0) == (variant == "preemption")


@contextmanager
def scarce_memory(worker: DeviceWorker, fails: Callable[[int], bool]) -> Iterator[None]:
    """Let some steps of the draft model, or of a head's first layer, run out of memory; they are counted from 1."""
    runner = worker._draft_layers[0].steps.runner
    compute, calls = runner.compute, itertools.count(1)

    def scarce(*sizes: Any) -> Any:
        if fails(next(calls)):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute(*sizes)

    with mock.patch.object(runner, "compute", scarce):
        yield


def test_step_without_memory_has_no_drafts(
    config: EngineConfig, device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    plain = run(config, worker_on(device, config, captured=False))
    drafted = with_draft(config, config)
    worker = drafting_on(device, drafted, captured=False)
    with scarce_memory(worker, lambda call: call % 3 == 0):
        driver = run(drafted, worker)
    assert_same(driver, plain, "with little memory")
    assert caplog.text.count("has no drafts, as the draft model ran out of memory") == 1
    assert counters_of(driver).num_accepted_tokens > 5


def test_kv_memory_is_that_of_both_models(config: EngineConfig, other: EngineConfig, device: Device) -> None:
    drafted = with_draft(config, other)
    kv, own = config.model.kv, other.model.kv.bytes_per_block
    assert drafted.model.kv.bytes_per_block == kv.bytes_per_block + own
    drafted = with_blocks(drafted, 24)
    worker = worker_on(device, drafted, captured=False)
    (layer,) = worker._draft_layers
    assert worker.num_blocks == layer.steps.runner.pool.num_blocks == 24


@pytest.mark.whole
def test_draft_model_of_several_ranks(tmp_path: Path) -> None:
    """Only rank 0 has it."""
    write_checkpoint(RANK_KINDS["llama"], tmp_path)
    config = changed(rank_config(tmp_path, batch_invariant=True), max_num_seqs=4, max_num_batched_tokens=64)
    config = byte_vocabulary.with_vocabulary(config, tmp_path)
    with leading_worker(config) as worker:
        plain = run(config, worker)
    hf_config, model = json.loads((tmp_path / "config.json").read_bytes()), config.model
    itself = engine_config(tmp_path, hf_config, model.kv.block_size, model.max_model_len, model.dtype)
    drafted = with_draft(config, itself)
    with leading_worker(drafted) as worker:
        driver = run(drafted, drafting(worker))
    assert_same(driver, plain, "with drafts")
    assert counters_of(driver).num_accepted_tokens > 20
