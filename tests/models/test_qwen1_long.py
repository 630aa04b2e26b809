"""Qwen 1 beyond the length of its training: a rotation by the prompt's length, queries that grow with their position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.equality import Loaded, alone, furthest, in_every_way, load, one_torch_thread
from tests.models.random_checkpoints import CLOSE, Expectation, expectations, of_module, write_checkpoint
from tests.models.references.qwen1 import Qwen1
from tests.models.rows.remote_code import QWEN_1

from quintet.deploy.config.model.card import read_facts
from quintet.executor.backends.cpu.program.runner import ProgramRunner

LENGTHS = (8, 15, 16, 17, 32, 33, 70)
"""Of prompts, trained length 16: steps of the rotation are at 16, 32 and 64, and answers of 12 tokens go across them."""

WAYS = {
    "together": {},
    "chunks": {"max_num_batched_tokens": 23, "long_prefill_token_threshold": 7},
    "preemption": {"max_num_batched_tokens": 37},
}


@pytest.fixture(autouse=True, scope="module")
def threads() -> Iterator[None]:
    with one_torch_thread():
        yield


class Rememberer:
    """Qwen 1 that knows which sequences are continuations, and how long the prompts of these were."""

    def __init__(self, card: Mapping[str, Any]) -> None:
        self.model = Qwen1(card)
        self.parameters, self.state_dict = self.model.parameters, self.model.state_dict
        self._prompts: dict[tuple[int, ...], int] = {}

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        tokens = tuple(token_ids.tolist())
        num_prompt = self._prompts[tokens] = self._prompts.get(tokens[:-1], len(tokens))
        return self.model(token_ids, num_prompt)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Expectation]]:
    folder = tmp_path_factory.mktemp("qwen1")
    card = QWEN_1 | {"seq_length": 16, "max_position_embeddings": 128}
    return folder, expectations(write_checkpoint(of_module(card, Rememberer), folder), LENGTHS)


def check(loaded: Loaded, expected: list[Expectation]) -> None:
    prompts, outputs = [each.prompt for each in expected], [each.outputs for each in expected]
    assert not loaded.config.cache.enable_prefix_caching
    by_itself = alone(loaded, prompts)
    assert furthest(by_itself, expected) < CLOSE
    assert by_itself.outputs == outputs
    for way, outcome in in_every_way(loaded, prompts, True, WAYS):
        assert outcome.outputs == outputs, way
        if isinstance(loaded.worker.runner, ProgramRunner):
            assert outcome.bits == by_itself.bits, way


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "torch"])
def test_what_its_own_rules_say(compiled: bool, made: tuple[Path, list[Expectation]]) -> None:
    folder, expected = made
    loaded = load(folder, compiled=compiled)
    assert loaded.config.model.max_model_len == 96
    check(loaded, expected)


def test_within_its_training_all_rotate_alike(made: tuple[Path, list[Expectation]]) -> None:
    facts = read_facts(made[0])
    assert (facts.max_model_len, facts.fixed_rope_len) == (128, 16)
