"""A model of states, a window and full attention on a device: one memory pool, and the tokens of torch's forward pass."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.cuda.test_worker import worker_on
from tests.models.equality import alone, load
from tests.models.test_engine import CoreAndWorker, changed
from tests.models.test_hybrids import HF_CONFIG, PROMPTS, greedy, hybrid

from quintet.core import recurrent_state
from quintet.executor.backends.cuda.device import Device
from quintet.executor.model_config.registry import FAMILIES


def test_hybrid_tokens_equal_torch(tmp_path: Path, device: Device) -> None:
    """In chunks that end at state checkpoints, in batches, with prefix cache hits, and with parallel samples of one prompt."""
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    family = replace(FAMILIES["MistralForCausalLM"], read=hybrid)
    with (
        mock.patch.dict(FAMILIES, {"HybridForTests": family}),
        mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32),
    ):
        loaded = load(tmp_path, compiled=False, load_format="dummy", swap_space=0.05)
        prompts = [PROMPTS[1], *PROMPTS[3:]]
        expected = alone(loaded, prompts, greedy()).outputs
        config = changed(loaded.config, max_num_seqs=8, max_num_batched_tokens=45)
        engine = CoreAndWorker(config, worker_on(device, config))
        for round_ in (0, 100):
            for i, prompt in enumerate(prompts):
                engine.admit(round_ + 10 * i + 1, prompt, greedy(n=1 + round_ // 100))
            engine.run()
            for i, outputs in enumerate(expected):
                assert engine.outputs[round_ + 10 * i + 1] == outputs, (round_, i)
    assert sum(engine.cached.values()) > 0
    assert [engine.outputs[100 + 10 * i + 2] for i in range(len(prompts))] == expected


def test_hybrid_steps_are_split_on_oom(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HF_CONFIG))
    (tmp_path / "tokenizer.json").write_text("{}")
    family = replace(FAMILIES["MistralForCausalLM"], read=hybrid)
    with mock.patch.dict(FAMILIES, {"HybridForTests": family}):
        loaded = load(tmp_path, compiled=False, load_format="dummy")
        expected = alone(loaded, PROMPTS[3:], greedy()).outputs
        config = changed(loaded.config, max_num_seqs=4, max_num_batched_tokens=45)
        worker = worker_on(device, config, captured=False)
        compute = worker.runner.compute

        def scarce(staging: torch.Tensor, num_rows: int, num_tokens: int, *sizes: Any) -> Any:
            drawn = compute(staging, num_rows, num_tokens, *sizes)
            if num_tokens > 20:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return drawn

        monkeypatch.setattr(worker.runner, "compute", scarce)
        engine = CoreAndWorker(config, worker)
        for i, prompt in enumerate(PROMPTS[3:]):
            engine.admit(i, prompt, greedy())
        engine.run()
    assert [engine.outputs[i] for i in range(2)] == expected
    assert worker.num_split > 1
