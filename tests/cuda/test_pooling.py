"""Pooled vectors of the device worker: hidden states of transformers in fp32; the same bits in any batch if it is invariant."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.cuda.test_worker import worker_on
from tests.cuda.test_worker_bits import invariant_config
from tests.models.equality import load
from tests.models.random_checkpoints import write_checkpoint
from tests.models.rows import gpt, llama
from tests.models.small_models import prompts_of
from tests.models.test_engine import changed
from tests.models.test_pooling import CLOSE, pooled, reference

from quintet.executor.backends.cuda.device import Device
from quintet.wire.pooling import PoolingConfig, PoolingType

ROWS = {"llama": llama.ROWS["llama"], "gpt2": gpt.ROWS["gpt2"]}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", ROWS)
def test_vectors_equal_hidden_states_of_transformers(name: str, tmp_path: Path, device: Device) -> None:
    write_checkpoint(ROWS[name], tmp_path)
    config, prompts = load(tmp_path, runner="pooling").config, prompts_of()
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
def test_bits_do_not_depend_on_the_batch(tmp_path: Path, device: Device) -> None:
    config = invariant_config(tmp_path)
    width = PoolingConfig(kind=PoolingType.LAST, width=int(config.model.embedding_width or 64))
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, pooling=width))
    worker, prompts = worker_on(device, config), prompts_of((16, 17, 40, 65))
    together, _ = pooled(config, worker, prompts)
    in_chunks = changed(config, max_num_batched_tokens=29, long_prefill_token_threshold=13)
    assert pooled(in_chunks, worker, prompts)[0] == together
    for i, prompt in enumerate(prompts):
        alone, _ = pooled(config, worker, [prompt], generates=False)
        assert {(kind, i): vector for (kind, _), vector in alone.items()} == {
            key: vector for key, vector in together.items() if key[1] == i
        }
