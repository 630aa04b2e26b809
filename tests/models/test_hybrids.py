"""Layers with states beside layers with keys and values, end to end: the same bits whatever becomes of a request's blocks.

The model has a short convolution, a scan, attention to everything and attention to a window, and random weights. What it says
is compared with transformers where its families are (`tests/models/test_equal.py`); here with itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from tests.models.equal import MORE_WAYS, Loaded, alone, in_every_way, load, run
from tests.models.test_engine import House, changed, without_prefix_cache
from tests.models.test_groups import lose_executor, with_blocks

from quintet.core import states
from quintet.executor.cards.card import ModelCard
from quintet.executor.cards.registry import FAMILIES
from quintet.executor.cards.spec import DecoderSpec
from quintet.executor.cards.state_specs import MambaSpec, ShortConvSpec
from quintet.wire.params import SamplingParams

NUM_TOKENS = 12
CARD = {
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


def hybrid(card: ModelCard) -> DecoderSpec:
    """Mistral, three layers of which are others."""
    spec = FAMILIES["MistralForCausalLM"].read(card)
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


@pytest.fixture(params=[False, True], ids=["eager", "compiled"])
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loaded]:
    """The model, with a state kept every 32 tokens."""
    (tmp_path / "config.json").write_text(json.dumps(CARD))
    (tmp_path / "tokenizer.json").write_text("{}")
    family = replace(FAMILIES["MistralForCausalLM"], read=hybrid)
    with (
        mock.patch.dict(FAMILIES, {"HybridForTests": family}),
        mock.patch.object(states, "KEEP_EVERY", 32),
    ):
        loaded = load(tmp_path, compiled=request.param, load_format="dummy", swap_space=0.05)
        kinds = {group.kind for group in loaded.config.model.kv.groups}
        assert kinds == {"full", "sliding", "state"}
        yield loaded


def greedy(n: int = 1) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0, ignore_eos=True, n=n)


def test_a_hybrid_is_the_same_in_every_way(loaded: Loaded) -> None:
    by_itself = alone(loaded, PROMPTS, greedy())
    ways = {way: settings for way, settings in MORE_WAYS.items() if "preemption" not in way}
    for way, outcome in in_every_way(loaded, PROMPTS, False, ways):
        assert [tokens[:NUM_TOKENS] for tokens in outcome.outputs] == by_itself.outputs, way


def test_who_is_preempted_says_the_same(loaded: Loaded) -> None:
    """Two requests fit to their prompts' ends, and not to their own."""
    asked = msgspec.structs.replace(greedy(), max_tokens=30)
    by_itself = alone(loaded, PROMPTS[3:], asked)
    house = House(with_blocks(changed(loaded.config, max_num_batched_tokens=37), 16), loaded.worker)
    for i, prompt in enumerate(PROMPTS[3:]):
        house.admit(i + 1, prompt, asked)
    house.run()
    assert [house.outputs[1], house.outputs[2]] == by_itself.outputs
    assert house.engine.state is not None
    assert house.engine.state.counters.preemptions > 0


def test_a_beginning_is_found_where_a_state_was_kept(loaded: Loaded) -> None:
    by_itself = alone(loaded, PROMPTS, greedy())
    outcome = run(loaded, changed(loaded.config), PROMPTS, rounds=2, params=greedy())
    assert outcome.outputs == by_itself.outputs
    assert outcome.num_cached > 0


@pytest.mark.parametrize("caching", [True, False])
def test_choices_and_a_lost_executor(loaded: Loaded, caching: bool) -> None:
    by_itself = alone(loaded, PROMPTS[2:], greedy())
    config = with_blocks(changed(loaded.config, max_num_batched_tokens=29), 100)
    house = House(config if caching else without_prefix_cache(config), loaded.worker)
    for i, prompt in enumerate(PROMPTS[2:]):
        house.admit(10 * i + 1, prompt, greedy(n=3))
    for _ in range(8):
        while (plan := house.engine.plan(0)) is not None:
            house._begin([plan])
        house._apply(house.engine.commit(house._pending.popleft().result(), 0))
    lose_executor(house)
    house.run()
    for i, outputs in enumerate(by_itself.outputs):
        assert [house.outputs[10 * i + 1 + choice] for choice in range(3)] == [outputs] * 3
