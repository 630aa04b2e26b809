"""Cards as their publishers wrote them, in the spellings of their time: what is read of them.

Whole models are compared with transformers in `test_equal`; their cards are in today's spelling.
"""

from __future__ import annotations

from typing import Any

from quintet.executor.cards.card import ModelCard
from quintet.executor.cards.registry import FAMILIES
from quintet.executor.cards.spec import DecoderSpec, QkvLayout

Card = dict[str, Any]


def read(architecture: str, card: Card) -> DecoderSpec:
    spec = FAMILIES[architecture].read(ModelCard(card, "config.json"))
    assert isinstance(spec, DecoderSpec)
    return spec


def test_phi_4_mini() -> None:
    card = {
        "hidden_act": "silu",
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "num_attention_heads": 24,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "original_max_position_embeddings": 4096,
        "partial_rotary_factor": 0.75,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        "rope_theta": 10000.0,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        "vocab_size": 200064,
    }
    spec = read("Phi3ForCausalLM", card)
    mixer = spec.layers[0].mixer
    assert mixer.rope is not None and (mixer.rope.kind, mixer.rope.rotary_dim) == ("longrope", 96)
    assert (spec.reach, spec.fixed_rope_len, mixer.layout) == (131072, 4096, QkvLayout.STACKED)
    card["rope_scaling"] = card["rope_scaling"] | {"type": "yarn"}  # so said the first cards of Phi 3
    rope = read("Phi3ForCausalLM", card).layers[0].mixer.rope
    assert rope is not None and rope.kind == "longrope"


def test_pythia_and_stablelm_say_how_much_is_rotated_in_words_of_their_own() -> None:
    card = {
        "hidden_act": "gelu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "layer_norm_eps": 1e-05,
        "max_position_embeddings": 2048,
        "num_attention_heads": 16,
        "num_hidden_layers": 16,
        "rotary_emb_base": 25000,
        "rotary_pct": 0.5,
        "tie_word_embeddings": False,
        "use_parallel_residual": True,
        "vocab_size": 50304,
    }
    rope = read("GPTNeoXForCausalLM", card).layers[0].mixer.rope
    assert rope is not None and (rope.rotary_dim, rope.theta) == (64, 25000.0)
    card = card | {"rope_pct": 0.25, "norm_eps": 1e-05, "use_qkv_bias": False, "hidden_act": "silu"}
    del card["rotary_pct"], card["layer_norm_eps"]
    layer = read("StableLMEpochForCausalLM", card).layers[0]
    assert layer.mixer.rope is not None and layer.mixer.rope.rotary_dim == 32


def test_qwen_1_stops_where_its_own_stretching_begins() -> None:
    card = {
        "hidden_size": 4096,
        "intermediate_size": 22016,
        "kv_channels": 128,
        "layer_norm_epsilon": 1e-06,
        "max_position_embeddings": 32768,
        "no_bias": True,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "rotary_emb_base": 10000,
        "rotary_pct": 1.0,
        "seq_length": 8192,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "vocab_size": 151936,
    }
    spec = read("QWenLMHeadModel", card)
    assert (spec.reach, spec.layers[0].mixer.qkv_bias, spec.layers[0].mixer.output_bias) == (
        8192,
        True,
        False,
    )
    assert 7.6e9 < spec.num_parameters < 7.8e9
