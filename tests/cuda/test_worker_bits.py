"""``--batch-invariant``: bits of a request alone, in a batch, in chunks and after preemption, with kernels for bf16.

The tests compare the log-probabilities of the most likely tokens. All of them share one normaliser, so a change of any
logit by one unit in the last place changes them.
"""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from bench.gpu.engine import InProcessEngine
from tests.cuda.test_worker import worker_on
from tests.gpu.small import (
    HF_CONFIG,
    SMALLER,
    params,
    prompts,
    run_all,
    with_blocks,
    with_executor,
    with_scheduler,
)
from tests.models.conftest import engine_config
from tests.models.equality import load
from tests.models.pooling.test_vectors import CLOSE, pooled, reference
from tests.models.random_checkpoints import write_checkpoint
from tests.models.rows import dense, gpt, latent, llama, states
from tests.models.small_models import prompts_of as token_lists
from tests.models.test_engine import changed

from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.worker import DeviceWorker
from quintet.wire.config import EngineConfig
from quintet.wire.pooling import PoolingConfig, PoolingType

NUM_TOKENS = 4
REQUESTS = (4, 5, 6, 9)
"""Prompts of 16, 17, 40 and 65 tokens: the first fills its block, the last is longer than a tile."""
WATCHED = (5, 9)

Bits = list[tuple[int, bytes, bytes]]


def invariant_config(folder: Path) -> EngineConfig:
    hf_config = HF_CONFIG | SMALLER | {"head_dim": 64}
    (folder / "config.json").write_text(json.dumps(hf_config))
    config = engine_config(
        folder, hf_config, 16, 128, "bfloat16", load_format="dummy", seed=3, batch_invariant=True
    )
    return with_scheduler(with_blocks(config, 200), max_num_seqs=len(REQUESTS))


KINDS = {
    "latent, experts of groups": latent.ROWS["deepseek v3"],
    "states beside attention, experts": states.ROWS["qwen3 next"],
    "norms of heads with weights of their own": dense.ROWS["cohere, normed queries"],
    "states of heads and attention in one layer": states.ROWS["falcon h1, normed"],
}
"""Layer kinds with other kernels than a Llama."""


def ask(config: EngineConfig, worker: DeviceWorker, numbers: tuple[int, ...] = REQUESTS) -> InProcessEngine:
    everything = prompts(max(REQUESTS), 200)
    requested = {
        number: (everything[number - 1], params(number, NUM_TOKENS, logprobs=5)) for number in numbers
    }
    return run_all(config, worker, requested)


def bits_of(engine: InProcessEngine) -> dict[int, Bits]:
    return {
        number: [(each.rank, each.token_ids, each.logprobs) for each in positions]
        for number, positions in engine.logprobs.items()
    }


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    return invariant_config(tmp_path)


def test_bits_do_not_depend_on_the_batch(config: EngineConfig, device: Device) -> None:
    worker = worker_on(device, config)
    together = bits_of(ask(config, worker))
    assert all(len(positions) == NUM_TOKENS for positions in together.values())
    for number in WATCHED:
        assert bits_of(ask(config, worker, (number,)))[number] == together[number], f"request {number} alone"
    in_chunks = with_scheduler(config, max_num_batched_tokens=29, long_prefill_token_threshold=13)
    assert bits_of(ask(in_chunks, worker)) == together, "in chunks"


@pytest.mark.whole
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_other_kinds_of_layers(kind: str, tmp_path: Path, device: Device) -> None:
    """Also with chunks that store no state, and all in one worker."""
    write_checkpoint(KINDS[kind], tmp_path)
    loaded = load(tmp_path, "bfloat16")
    invariant = with_executor(loaded.config, batch_invariant=True)
    config = with_scheduler(invariant, max_num_seqs=8, max_num_batched_tokens=128)
    worker = worker_on(device, config)
    together = bits_of(ask(config, worker, (5, 6)))
    assert all(len(positions) == NUM_TOKENS for positions in together.values())
    assert bits_of(ask(config, worker, (5,)))[5] == together[5], "alone"
    in_chunks = with_scheduler(config, max_num_batched_tokens=29, long_prefill_token_threshold=13)
    assert bits_of(ask(in_chunks, worker, (5, 6))) == together, "in chunks"


def test_bits_do_not_depend_on_preemption_or_graphs(config: EngineConfig, device: Device) -> None:
    reference = ask(config, worker_on(device, config))
    small = with_blocks(config, 11)
    crowded = ask(small, worker_on(device, small, captured=False))
    assert crowded.counters.preemptions > reference.counters.preemptions == 0
    assert bits_of(crowded) == bits_of(reference)


POOLED = {"llama": llama.ROWS["llama"], "gpt2": gpt.ROWS["gpt2"]}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", POOLED)
def test_vectors_equal_hidden_states_of_transformers(name: str, tmp_path: Path, device: Device) -> None:
    write_checkpoint(POOLED[name], tmp_path)
    config, prompts = load(tmp_path, runner="pooling").config, token_lists()
    worker, expected = worker_on(device, config), reference(tmp_path, prompts)
    variants = {
        "together": changed(config),
        "chunks": changed(config, max_num_batched_tokens=23, long_prefill_token_threshold=7),
    }
    for variant, settings in variants.items():
        for key, vector in pooled(settings, worker, prompts, rounds=2)[0].items():
            apart = torch.from_numpy(np.frombuffer(vector, np.float32).copy()) - expected[key]
            assert float(apart.norm() / expected[key].norm()) < CLOSE, (variant, key)


@pytest.mark.whole
def test_bits_of_vectors_do_not_depend_on_the_batch(tmp_path: Path, device: Device) -> None:
    config = invariant_config(tmp_path)
    width = PoolingConfig(kind=PoolingType.LAST, width=int(config.model.embedding_width or 64))
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, pooling=width))
    worker, prompts = worker_on(device, config), token_lists((16, 17, 40, 65))
    together, _ = pooled(config, worker, prompts)
    in_chunks = changed(config, max_num_batched_tokens=29, long_prefill_token_threshold=13)
    assert pooled(in_chunks, worker, prompts)[0] == together
    for i, prompt in enumerate(prompts):
        alone, _ = pooled(config, worker, [prompt], generates=False)
        assert {(kind, i): vector for (kind, _), vector in alone.items()} == {
            key: vector for key, vector in together.items() if key[1] == i
        }
