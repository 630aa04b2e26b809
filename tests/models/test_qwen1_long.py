"""Qwen 1 beyond its training length: dynamic NTK by the prompt's length, and logn-scaled queries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.equality import Loaded, alone, load, max_difference, one_torch_thread, run_schedules
from tests.models.random_checkpoints import CLOSE, Expectation, expectations, of_module, write_checkpoint
from tests.models.references.qwen1 import Qwen1
from tests.models.rows.remote_code import QWEN_1

from quintet.deploy.config.model.hf_config import read_facts
from quintet.executor.backends.cpu.program.runner import ProgramRunner

LENGTHS = (8, 15, 16, 17, 32, 33, 70)
"""Of prompts, trained length 16: steps of the rotation are at 16, 32 and 64, and outputs of 12 tokens cross them."""

SCHEDULES = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 23, "long_prefill_token_threshold": 7},
    "preemption": {"max_num_batched_tokens": 37},
}


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_torch_thread():
        yield


class Qwen1WithPrompts:
    """Qwen 1 that records the prompt length of each continued sequence."""

    def __init__(self, hf_config: Mapping[str, Any]) -> None:
        self.model = Qwen1(hf_config)
        self.parameters, self.state_dict = self.model.parameters, self.model.state_dict
        self._prompts: dict[tuple[int, ...], int] = {}

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        tokens = tuple(token_ids.tolist())
        num_prompt = self._prompts[tokens] = self._prompts.get(tokens[:-1], len(tokens))
        return self.model(token_ids, num_prompt)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Expectation]]:
    folder = tmp_path_factory.mktemp("qwen1")
    hf_config = QWEN_1 | {"seq_length": 16, "max_position_embeddings": 128}
    return folder, expectations(write_checkpoint(of_module(hf_config, Qwen1WithPrompts), folder), LENGTHS)


def check(loaded: Loaded, expected: list[Expectation]) -> None:
    prompts, outputs = [each.prompt for each in expected], [each.outputs for each in expected]
    assert not loaded.config.cache.enable_prefix_caching
    by_itself = alone(loaded, prompts)
    assert max_difference(by_itself, expected) < CLOSE
    assert by_itself.outputs == outputs
    for schedule, outcome in run_schedules(loaded, prompts, True, SCHEDULES):
        assert outcome.outputs == outputs, schedule
        if isinstance(loaded.worker.runner, ProgramRunner):
            assert outcome.bits == by_itself.bits, schedule


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_tokens_beyond_the_training_length(compiled: bool, made: tuple[Path, list[Expectation]]) -> None:
    folder, expected = made
    loaded = load(folder, compiled=compiled)
    assert loaded.config.model.max_model_len == 96
    check(loaded, expected)


def test_rotation_within_the_training_length(made: tuple[Path, list[Expectation]]) -> None:
    facts = read_facts(made[0])
    assert (facts.spec.reach, facts.spec.fixed_rope_len) == (128, 16)
