"""Layers with states next to attention layers, end to end: the same bits under every block operation.

The model has a short convolution, a scan, full attention and sliding-window attention, and random weights. The tests
compare it with itself; `tests/models/test_equal.py` compares its families with transformers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from tests.models import equality
from tests.models.equality import MORE_SCHEDULES, Loaded, alone, load, run, run_schedules
from tests.models.kv.test_groups import lose_executor, run_evicting, with_blocks
from tests.models.test_engine import CoreAndWorker, changed, without_prefix_cache

from quintet.core import recurrent_state
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.spec import DecoderSpec
from quintet.executor.model_config.state_specs import MambaSpec, ShortConvSpec
from quintet.wire.params import SamplingParams

NUM_TOKENS = 12
HF_CONFIG = {
    "architectures": ["HybridForTests"],
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 97,
    "max_position_embeddings": 512,
    "sliding_window": 11,
    "eos_token_id": None,
}
PROMPTS = [[(7 * i + 3 * n + 1) % 97 for n in range(length)] for i, length in enumerate((1, 17, 40, 61, 62))]
PROMPTS[4][:48] = PROMPTS[3][:48]


def hybrid(hf_config: HfConfig) -> DecoderSpec:
    """Mistral with three other layers."""
    spec = FAMILIES["MistralForCausalLM"].read(hf_config)
    assert isinstance(spec, DecoderSpec)
    mamba = MambaSpec(channels=128, state_size=16, dt_rank=4, taps=4, conv_bias=True, projection_bias=False)
    attention = spec.layers[0].mixer
    mixers = (
        ShortConvSpec(channels=64, taps=3, biased=False),
        replace(attention, window=None),
        mamba,
        attention,
    )
    layers = zip(spec.layers, mixers, strict=True)
    return replace(spec, layers=tuple(replace(layer, mixer=mixer) for layer, mixer in layers))


@contextmanager
def of_tests(folder: Path) -> Iterator[None]:
    """Write a folder of the model, which is registered during the test."""
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    (folder / "tokenizer.json").write_text("{}")
    family = replace(FAMILIES["MistralForCausalLM"], read=hybrid)
    with mock.patch.dict(FAMILIES, {"HybridForTests": family}):
        yield


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loaded]:
    """The model, with a state checkpoint every 32 tokens."""
    with of_tests(tmp_path), mock.patch.object(recurrent_state, "CHECKPOINT_EVERY", 32):
        loaded = load(tmp_path, compiled=request.param, load_format="dummy", swap_space=0.05)
        kinds = {group.kind for group in loaded.config.model.kv.groups}
        assert kinds == {"full", "sliding", "state"}
        yield loaded


def greedy(n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0, ignore_eos=True, n=n)


def test_hybrid_is_equal_in_every_schedule(loaded: Loaded) -> None:
    by_itself = alone(loaded, PROMPTS, greedy())
    schedules = {
        schedule: settings for schedule, settings in MORE_SCHEDULES.items() if "preemption" not in schedule
    }
    for schedule, outcome in run_schedules(loaded, PROMPTS, False, schedules):
        assert [tokens[:NUM_TOKENS] for tokens in outcome.outputs] == by_itself.outputs, schedule


def test_preempted_requests_give_the_same_tokens(loaded: Loaded) -> None:
    """Two requests fit with their prompts, and barely or not with their outputs. The blocks of one are swapped to the host."""
    requested = msgspec.structs.replace(greedy(), max_tokens=30)
    by_itself = alone(loaded, PROMPTS[3:], requested)
    num_preemptions = num_back = 0
    for num_blocks in (14, 15, 16):
        driver = CoreAndWorker(
            with_blocks(changed(loaded.config, max_num_batched_tokens=37), num_blocks), loaded.worker
        )
        for i, prompt in enumerate(PROMPTS[3:]):
            driver.admit(i + 1, prompt, requested)
        driver.run()
        assert [driver.outputs[1], driver.outputs[2]] == by_itself.outputs, num_blocks
        assert driver.engine.state is not None
        num_preemptions += driver.engine.state.counters.preemptions
        num_back += driver.engine.state.counters.swap_in_blocks
    assert num_preemptions > 0 and num_back > 0


def test_swapped_blocks_are_restored(loaded: Loaded) -> None:
    """Keys, values and kept states are copied out, their blocks are overwritten, and they are copied back."""
    requested = msgspec.structs.replace(greedy(), max_tokens=30)
    by_itself = alone(loaded, PROMPTS[2:], requested)
    driver = CoreAndWorker(with_blocks(changed(loaded.config, max_num_batched_tokens=37), 60), loaded.worker)
    for i, prompt in enumerate(PROMPTS[2:]):
        driver.admit(i + 1, prompt, requested)
    run_evicting(driver, 1)
    assert [driver.outputs[i + 1] for i in range(3)] == by_itself.outputs
    assert driver.engine.state is not None
    counters = driver.engine.state.counters
    assert counters.preemptions > 0 and counters.swap_in_blocks > 0


def test_chat_turn_hits_the_prefix_cache(tmp_path: Path) -> None:
    """Only a turn's new tokens are computed, though a block exceeds the chat; the results equal a full computation."""
    with mock.patch.object(equality, "BLOCK_SIZE", 80), of_tests(tmp_path):
        loaded = load(tmp_path, load_format="dummy")
        driver = CoreAndWorker(changed(loaded.config), loaded.worker)
        history = PROMPTS[1]
        for turn in range(3):
            driver.admit(turn, history, greedy())
            driver.run()
            assert [driver.outputs[turn]] == alone(loaded, [history], greedy()).outputs
            assert driver.cached[turn] == (0 if turn == 0 else len(history) - len(PROMPTS[1]) - 1)
            history = history + driver.outputs[turn] + PROMPTS[1]


def test_prefix_hits_end_at_state_checkpoints(loaded: Loaded) -> None:
    by_itself = alone(loaded, PROMPTS, greedy())
    outcome = run(loaded, changed(loaded.config), PROMPTS, rounds=2, params=greedy())
    assert outcome.outputs == by_itself.outputs
    assert outcome.num_cached > 0


@pytest.mark.parametrize("caching", [True, False])
def test_choices_and_a_lost_executor(loaded: Loaded, caching: bool) -> None:
    by_itself = alone(loaded, PROMPTS[2:], greedy())
    config = with_blocks(changed(loaded.config, max_num_batched_tokens=29), 100)
    driver = CoreAndWorker(config if caching else without_prefix_cache(config), loaded.worker)
    for i, prompt in enumerate(PROMPTS[2:]):
        driver.admit(10 * i + 1, prompt, greedy(n=3))
    for _ in range(8):
        while (plan := driver.engine.plan(0)) is not None:
            driver._begin([plan])
        driver._apply(driver.engine.commit(driver._pending.popleft().result(), 0))
    lose_executor(driver)
    driver.run()
    for i, outputs in enumerate(by_itself.outputs):
        assert [driver.outputs[10 * i + 1 + choice] for choice in range(3)] == [outputs] * 3
