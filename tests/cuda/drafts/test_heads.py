"""Draft heads on a device: drafts are those of a reference, and outputs are those without drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.cuda.device_ranks import leading_worker
from tests.cuda.drafts.test_draft_model import counters_of, drafting_on, scarce_memory
from tests.cuda.test_device_ranks import rank_config
from tests.cuda.test_drafts import LENGTHS, assert_same, run
from tests.cuda.test_worker import BLOCKS_OF_16, worker_on
from tests.gpu.small import with_blocks, with_executor, with_scheduler
from tests.models.conftest import serve
from tests.models.equality import load
from tests.models.small_models import FAMILIES, prompts_of
from tests.models.speculation.draft_heads import record_drafts, with_head
from tests.models.speculation.longest_drafts import drafting
from tests.models.speculation.mtp_checkpoints import write
from tests.models.speculation.test_draft_heads import GREEDY, HEADS
from tests.models.test_engine import CoreAndWorker, changed

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.head_drafter import DeviceBits
from quintet.executor.backends.cuda.worker import DeviceWorker
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams

__all__ = ["serve"]

REQUESTS = (
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.95, top_k=50, min_p=0.01),
    SamplingParams(temperature=0.7, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, logit_bias={5: 4.0}, logprobs=0),
    SamplingParams(temperature=0.9, stop_token_ids=list(range(0, 200, 9))),
)


def check_drafts(
    config: EngineConfig, worker: DeviceWorker, expected: Callable[[list[int], int], list[int]]
) -> None:
    """Compare drafts of prompts in chunks, and after a cached prefix, with those of a reference."""
    found = record_drafts(worker)  # type: ignore[arg-type]
    driver = CoreAndWorker(changed(config, max_num_batched_tokens=40), worker)
    for index, prompt in enumerate(prompts_of((1, 8, 50))):
        driver.admit(index + 1, prompt, GREEDY)
    driver.run()
    driver.admit(9, prompts_of((1, 8, 50))[2], GREEDY)
    driver.run()
    proposals = [each for each in found if each[1]]
    assert len(proposals) > 40
    for tokens, drafts in (*proposals[:20:4], *proposals[20::7], proposals[-1]):
        reference = expected(tokens, len(drafts))
        assert drafts[: len(reference)] == reference


@BLOCKS_OF_16
@pytest.mark.parametrize("name", ["eagle", "eagle3, plain", "eagle3, token map", "medusa", "medusa of vllm"])
def test_drafts_are_those_of_the_reference(
    name: str, tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any], device: Device
) -> None:
    served, head = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96), HEADS[name]()
    config = with_head(served.config, tmp_path_factory.mktemp("head"), head)
    worker = drafting_on(device, config)
    check_drafts(config, worker, lambda tokens, count: head.drafts(served.reference, tokens, count))


def test_drafts_after_steps_without_memory_are_those_of_the_reference(
    tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any], device: Device
) -> None:
    served, head = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96), HEADS["eagle"]()
    config = with_head(served.config, tmp_path_factory.mktemp("head"), head)
    worker = drafting_on(device, config, captured=False)
    with scarce_memory(worker, lambda call: call in (1, 4, 7, 10)):
        check_drafts(config, worker, lambda tokens, count: head.drafts(served.reference, tokens, count))


@pytest.mark.parametrize("name", ["deepseek v3", "mimo, two layers"])
def test_drafts_of_prediction_layers_are_those_of_the_reference(
    name: str, tmp_path: Path, device: Device
) -> None:
    reference = write(name, tmp_path)
    flag = '{"method": "mtp", "num_speculative_tokens": 4}'
    config = load(tmp_path, speculative_config=flag).config
    check_drafts(config, drafting_on(device, config, captured=False), reference.drafts)


@BLOCKS_OF_16
@pytest.mark.parametrize("name", ["eagle", "eagle3, token map", "medusa"])
def test_outputs_are_those_without_drafts(
    name: str, tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any], device: Device
) -> None:
    served = serve(FAMILIES["qwen3"](), max_model_len=96)
    config = with_scheduler(with_executor(served.config, batch_invariant=True), max_num_seqs=8)
    plain = run(config, worker_on(device, config, captured=False), REQUESTS)
    drafted = with_head(config, tmp_path_factory.mktemp("head"), HEADS[name]())
    worker = drafting_on(device, drafted)
    for variant, each in {
        "together": drafted,
        "preemption": with_blocks(drafted, 8),
        "three at a time, in chunks": with_scheduler(drafted, max_num_seqs=3, max_num_batched_tokens=17),
    }.items():
        driver = run(each, worker, REQUESTS)
        assert_same(driver, plain, variant)
        assert counters_of(driver).num_draft_tokens > 10 * len(LENGTHS), variant


@pytest.mark.whole
@pytest.mark.parametrize("name", ["eagle", "eagle3, token map", "medusa"])
def test_heads_of_several_ranks(
    name: str, tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Any]
) -> None:
    """Only rank 0 has the head. It computes all logits of the output layer, of which each rank has a part."""
    served, head = serve(FAMILIES["llama-gqa-biases"](), max_model_len=96), HEADS[name]()
    folder = Path(served.config.model.path)
    (folder / "tokenizer.json").write_text("{}")
    config = rank_config(folder, batch_invariant=True)
    config = with_scheduler(config, max_num_seqs=8, max_num_batched_tokens=64)
    with leading_worker(config) as worker:
        plain = run(config, worker, REQUESTS)
    drafted = with_head(config, tmp_path_factory.mktemp("head"), head)
    with leading_worker(drafted) as worker:
        driver = run(drafted, drafting(worker), REQUESTS)
        assert_same(driver, plain, "with drafts")
        assert counters_of(driver).num_draft_tokens > 10 * len(LENGTHS)
        check_drafts(drafted, worker, lambda tokens, count: head.drafts(served.reference, tokens, count))


def test_values_on_a_device_are_indexed_as_arrays() -> None:
    """Masks, pairs of indices, slices and integers, read and written."""
    array = np.arange(24, dtype=np.int16).reshape(6, 2, 2)
    bits = DeviceBits(torch.from_numpy(array.copy()))
    numbers, mask = np.array([4, 0], np.int32), np.array([1, 0, 0, 1, 0, 1], np.bool_)
    for index in (numbers, mask, slice(1, 3), 2, (numbers, 1), (numbers, numbers // 4)):
        assert (bits[index].tensor.numpy() == array[index]).all()
        bits[index], array[index] = bits[index], array[index]
        bits[index] = array[index] = 0
        assert (bits.tensor.numpy() == array).all()
    assert len(bits) == 6 and bits.reshape(12, -1).tensor.shape == (12, 2)
