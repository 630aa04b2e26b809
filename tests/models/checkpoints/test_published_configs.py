"""Configs as published, in their historical spellings, and the specs read from them.

Whole models are compared with transformers in `test_equal`; their configs use today's spelling.
"""

from __future__ import annotations

from typing import Any

import pytest

from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES
from quintet.executor.model_config.spec import AttentionSpec, DecoderSpec, MlpSpec, QkvLayout
from quintet.wire.errors import ConfigError

ConfigJson = dict[str, Any]


def read(architecture: str, hf_config: ConfigJson) -> DecoderSpec:
    spec = FAMILIES[architecture].read(HfConfig(hf_config, "config.json"))
    assert isinstance(spec, DecoderSpec)
    return spec


def test_gemma_3_with_vision() -> None:
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    spec = read("Gemma3ForConditionalGeneration", {"model_type": "gemma3", "text_config": text})
    first, sixth = spec.layers[0].mixer, spec.layers[5].mixer
    assert (spec.vocab_size, spec.tied, len(spec.layers), spec.logit_softcap) == (262208, True, 34, None)
    assert (first.num_heads, first.num_kv_heads, first.head_dim, first.scale) == (8, 4, 256, 256**-0.5)
    assert (first.window, sixth.window) == (1024, None)
    assert first.rope is not None and (first.rope.theta, first.rope.kind) == (10000.0, "default")
    assert sixth.rope is not None and (sixth.rope.theta, sixth.rope.factor) == (1e6, 8.0)
    assert spec.names.prefix == "language_model."
    assert spec.reach == 131072
    assert 3.8e9 < spec.num_parameters < 4e9


def test_a_tensor_in_four_parts_has_as_many_keys_as_queries() -> None:
    """CodeGen has no grouped queries, so its code does not read a number of KV heads."""
    hf_config = {
        "n_embd": 64,
        "n_head": 8,
        "n_layer": 2,
        "num_key_value_heads": 2,
        "rotary_dim": 8,
        "vocab_size": 96,
    }
    mixer = read("CodeGenForCausalLM", hf_config).layers[0].mixer
    assert isinstance(mixer, AttentionSpec)
    assert (mixer.layout, mixer.num_kv_heads) == (QkvLayout.QUARTERS, 8)


def test_gemma_2() -> None:
    hf_config = {
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 128,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 4608,
        "intermediate_size": 36864,
        "max_position_embeddings": 8192,
        "num_attention_heads": 32,
        "num_hidden_layers": 46,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 144,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_size": 4096,
        "vocab_size": 256000,
    }
    spec = read("Gemma2ForCausalLM", hf_config)
    assert [layer.mixer.window for layer in spec.layers[:3]] == [4096, None, 4096]
    assert spec.layers[0].mixer.scale == 144**-0.5
    assert (spec.embedding_scale, spec.logit_softcap, spec.tied) == (4608**0.5, 30.0, True)
    assert 27e9 < spec.num_parameters < 27.5e9


def test_phi_4_mini() -> None:
    hf_config = {
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
    spec = read("Phi3ForCausalLM", hf_config)
    mixer = spec.layers[0].mixer
    assert mixer.rope is not None and (mixer.rope.kind, mixer.rope.rotary_dim) == ("longrope", 96)
    assert (spec.reach, spec.fixed_rope_len, mixer.layout) == (131072, 4096, QkvLayout.STACKED)
    hf_config["rope_scaling"] = hf_config["rope_scaling"] | {
        "type": "yarn"
    }  # as in the first configs of Phi 3
    rope = read("Phi3ForCausalLM", hf_config).layers[0].mixer.rope
    assert rope is not None and rope.kind == "longrope"


def test_falcon_with_remote_code_config() -> None:
    hf_config = {
        "alibi": False,
        "apply_residual_connection_post_layernorm": False,
        "bias": False,
        "hidden_size": 4544,
        "layer_norm_epsilon": 1e-05,
        "model_type": "RefinedWebModel",
        "multi_query": True,
        "n_head": 71,
        "n_layer": 32,
        "parallel_attn": True,
        "vocab_size": 65024,
    }
    spec = read("RWForCausalLM", hf_config)
    layer = spec.layers[0]
    assert (layer.mixer.num_heads, layer.mixer.num_kv_heads, layer.mixer.head_dim) == (71, 1, 64)
    assert (layer.parallel, layer.mlp_norms.before, layer.mixer.alibi) == (True, None, ())
    grouped = hf_config | {
        "n_head_kv": 8,
        "n_head": 128,
        "hidden_size": 8192,
        "new_decoder_architecture": True,
    }
    spec = read("FalconForCausalLM", grouped)
    assert spec.layers[0].mixer.num_kv_heads == 8 and spec.names.mlp_norm == "ln_mlp"


def test_bloom_context_is_its_training_length() -> None:
    hf_config = {
        "layer_norm_epsilon": 1e-05,
        "n_embed": 1024,
        "n_head": 16,
        "n_inner": None,
        "n_layer": 24,
        "num_attention_heads": 16,
        "offset_alibi": 100,
        "pretraining_tp": 1,
        "seq_length": 2048,
        "vocab_size": 250880,
    }
    spec = read("BloomForCausalLM", hf_config)
    mixer = spec.layers[0].mixer
    assert (spec.reach, spec.hidden_size, spec.tied) == (2048, 1024, True)
    assert mixer.alibi[:2] == (2**-0.5, 2**-1.0) and len(mixer.alibi) == 16


def test_slopes_of_other_numbers_of_heads_than_powers_of_two() -> None:
    hf_config = {"hidden_size": 14336, "n_head": 112, "n_layer": 1, "vocab_size": 250880}
    slopes = read("BloomForCausalLM", hf_config).layers[0].mixer.alibi
    assert len(slopes) == 112
    assert slopes[:64] == tuple(2.0 ** (-(i + 1) / 8) for i in range(64))
    assert slopes[64:] == tuple(2.0 ** (-(2 * i + 1) / 16) for i in range(48))


def test_mpt_context_and_slopes() -> None:
    hf_config = {
        "attn_config": {"alibi": True, "alibi_bias_max": 16, "attn_impl": "torch", "clip_qkv": 6},
        "d_model": 4096,
        "expansion_ratio": 4,
        "learned_pos_emb": True,
        "logit_scale": None,
        "max_seq_len": 65536,
        "n_heads": 32,
        "n_layers": 32,
        "no_bias": True,
        "vocab_size": 50432,
    }
    spec = read("MPTForCausalLM", hf_config)
    mixer = spec.layers[0].mixer
    assert (spec.reach, mixer.clip_qkv, mixer.alibi[0], mixer.alibi[-1]) == (65536, 6.0, 2**-0.5, 2**-16.0)
    assert (spec.positions, mixer.qkv_bias, spec.tied) == (None, False, True)
    learned = read("MPTForCausalLM", hf_config | {"attn_config": {"alibi": False}})
    assert learned.positions is not None and learned.positions.count == 65536


def test_partial_rotation_keys_of_pythia_and_stablelm() -> None:
    hf_config = {
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
    rope = read("GPTNeoXForCausalLM", hf_config).layers[0].mixer.rope
    assert rope is not None and (rope.rotary_dim, rope.theta) == (64, 25000.0)
    hf_config = hf_config | {"rope_pct": 0.25, "norm_eps": 1e-05, "use_qkv_bias": False, "hidden_act": "silu"}
    del hf_config["rotary_pct"], hf_config["layer_norm_eps"]
    layer = read("StableLMEpochForCausalLM", hf_config).layers[0]
    assert layer.mixer.rope is not None and layer.mixer.rope.rotary_dim == 32


def test_baichuan_by_its_size() -> None:
    hf_config = {
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 13696,
        "model_max_length": 4096,
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "vocab_size": 125696,
        "z_loss_weight": 0,
    }
    spec = read("BaichuanForCausalLM", hf_config)
    assert len(spec.layers[0].mixer.alibi) == 40 and spec.layers[0].mixer.rope is None
    assert (spec.reach, spec.normalised_head) == (4096, True)
    seven = hf_config | {"hidden_size": 4096, "num_attention_heads": 32, "max_position_embeddings": 4096}
    spec = read("BaichuanForCausalLM", seven)
    assert spec.layers[0].mixer.rope is not None and spec.layers[0].mixer.alibi == ()


def test_qwen_1_context_with_dynamic_ntk() -> None:
    hf_config = {
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
    spec = read("QWenLMHeadModel", hf_config)
    mixer = spec.layers[0].mixer
    assert (mixer.qkv_bias, mixer.output_bias, spec.reach, spec.fixed_rope_len) == (True, False, 32768, 8192)
    assert mixer.rope is not None and mixer.rope.kind == "stairs"
    assert mixer.temperature is not None and (mixer.temperature.period, mixer.temperature.shift) == (
        8192,
        -8191,
    )
    for change in ({"use_dynamic_ntk": False}, {"max_position_embeddings": 8192}):
        within = read("QWenLMHeadModel", hf_config | change)
        assert (within.reach, within.fixed_rope_len, within.layers[0].mixer.temperature) == (8192, None, None)
    assert 7.6e9 < spec.num_parameters < 7.8e9


def test_qwen_3_next_without_listed_layers() -> None:
    hf_config = {
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "moe_intermediate_size": 512,
        "num_attention_heads": 16,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "num_hidden_layers": 48,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": 512,
        "vocab_size": 151936,
    }
    spec = read("Qwen3NextForCausalLM", hf_config)
    assert [need is None for need in spec.kv_needs] == [True, True, True, False] * 12
    mixer = spec.layers[3].mixer
    assert mixer.rope is not None and (mixer.rope.rotary_dim, mixer.output_gate) == (64, True)
    assert 79.5e9 < spec.num_parameters < 80e9
    nothing_attends = read("Qwen3NextForCausalLM", hf_config | {"num_hidden_layers": 3})
    assert (nothing_attends.kv_needs, nothing_attends.reach) == ((None,) * 3, 262144)


@pytest.mark.parametrize(
    ("architecture", "change", "error"),
    [
        ("GPT2LMHeadModel", {"add_cross_attention": True}, "add_cross_attention is True; it must be false"),
        (
            "GPT2LMHeadModel",
            {"activation_function": "mish"},
            "activation_function is 'mish'; it must be one of",
        ),
        ("GemmaForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (
            "SmolLM3ForCausalLM",
            {"no_rope_layers": [1, 2]},
            "no_rope_layers is [1, 2]; it must be a list of 2",
        ),
        ("Gemma2ForCausalLM", {"layer_types": ["full_attention"]}, "it must be a list of 2 words"),
        ("GPTJForCausalLM", {"rotary_dim": 3}, "rotary_dim is 3; it must be"),
    ],
)
def test_invalid_values_are_named(architecture: str, change: ConfigJson, error: str) -> None:
    hf_config = {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 99}
    with pytest.raises(ConfigError) as caught:
        read(architecture, hf_config | {"intermediate_size": 64} | change)
    assert error in str(caught.value)


_SIZES: ConfigJson = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("BambaForCausalLM", {"mamba_n_heads": 4, "mamba_d_head": 32}),
        ("Lfm2ForCausalLM", {"layer_types": ["conv", "conv"]}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [0, 0]}),
        ("Cohere2ForCausalLM", {"layer_types": ["full_attention", "full_attention"]}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_context_of_a_model_without_rotation(architecture: str, more: ConfigJson) -> None:
    assert read(architecture, _SIZES | more).reach == 512


@pytest.mark.parametrize(
    ("architecture", "theta", "share"),
    [
        ("MixtralForCausalLM", 1e6, 1.0),
        ("GptOssForCausalLM", 150000.0, 1.0),
        ("Glm4MoeForCausalLM", 10000.0, 0.5),
    ],
)
def test_missing_keys_have_the_defaults_of_the_family(architecture: str, theta: float, share: float) -> None:
    (rope,) = read(architecture, _SIZES | {"head_dim": 64}).ropes
    assert (rope.theta, rope.rotary_dim) == (theta, 64 * share)


def test_default_kv_heads_of_qwen_moe() -> None:
    hf_config = {key: value for key, value in _SIZES.items() if key != "num_key_value_heads"}
    for architecture, kv_heads in (("Qwen2MoeForCausalLM", 16), ("Qwen3MoeForCausalLM", 4)):
        spec = read(architecture, hf_config | {"num_attention_heads": 16})
        assert spec.layers[0].attention is not None
        assert spec.layers[0].attention.kv_need.num_kv_heads == kv_heads


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("GPT2LMHeadModel", "n_inner"),
        ("GPTBigCodeForCausalLM", "n_inner"),
        ("GPTJForCausalLM", "n_inner"),
        ("BloomForCausalLM", None),
        ("FalconForCausalLM", "ffn_hidden_size"),
        ("OPTForCausalLM", "ffn_dim"),
        ("XGLMForCausalLM", "ffn_dim"),
    ],
)
def test_feed_forward_width_key_of_each_family(architecture: str, key: str | None) -> None:
    """transformers ignores the other keys, which some configs contain as well."""
    cases = [({}, 256)] if key is None else [({}, 256), ({key: 160}, 160), ({key: None}, 256)]
    for more, width in cases:
        mlp = read(architecture, _SIZES | {"rotary_dim": 8} | more).layers[0].mlp
        assert isinstance(mlp, MlpSpec) and mlp.width == width


def test_default_widths_of_llama_4() -> None:
    hf_config = {key: value for key, value in _SIZES.items() if key != "intermediate_size"}
    first, second = (
        layer.mlp for layer in read("Llama4ForCausalLM", hf_config | {"interleave_moe_layer_step": 2}).layers
    )
    assert isinstance(first, MlpSpec) and first.width == 16384
    assert isinstance(second, ExpertsSpec) and (second.width, second.shared_width) == (8192, 8192)


@pytest.mark.parametrize("width", [{}, {"head_dim": 16}, {"kv_channels": 16}])
def test_chatglm_rotates_half_of_each_head(width: ConfigJson) -> None:
    mixer = read("ChatGLMModel", _SIZES | {"ffn_hidden_size": 96, "seq_length": 512} | width).layers[0].mixer
    assert isinstance(mixer, AttentionSpec) and mixer.head_dim == (16 if width else 128)
    assert mixer.rope is not None and 2 * mixer.rope.rotary_dim == mixer.head_dim


@pytest.mark.parametrize("architecture", ["BloomForCausalLM", "LlamaForCausalLM"])
def test_heads_that_do_not_divide_the_width(architecture: str) -> None:
    sizes = {"vocab_size": 256, "hidden_size": 100, "num_hidden_layers": 2, "num_attention_heads": 7}
    hf_config = sizes | {"intermediate_size": 128, "max_position_embeddings": 64}
    with pytest.raises(
        ConfigError, match="num_attention_heads is 7; it must be a divisor of hidden_size, 100"
    ):
        read(architecture, hf_config)
