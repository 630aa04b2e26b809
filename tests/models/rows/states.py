"""Models with states: scans, short convolutions, and hybrids of them with attention."""

from dataclasses import replace

from tests.models.checkpoints.renamed import with_vision
from tests.models.random_checkpoints import Row, of_transformers
from tests.models.rows.reference import MAMBA2_GROUPS

MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24}
QWEN_NEXT = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "num_experts": 9,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}

MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [2, 1, 1],
}
QWEN_TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
QWEN_DENSE = {key: value for key, value in QWEN_NEXT.items() if "expert" not in key and "moe" not in key}


_ROWS: dict[str, Row] = {
    "mamba": of_transformers("MambaConfig"),
    "mamba, biases, untied": of_transformers(
        "MambaConfig", use_bias=True, use_conv_bias=False, tie_word_embeddings=False, conv_kernel=3
    ),
    "falcon mamba": of_transformers("FalconMambaConfig", state_size=12),
    "mamba2": of_transformers(
        "Mamba2Config", num_heads=8, head_dim=16, n_groups=MAMBA2_GROUPS, state_size=24
    ),
    "mamba2, one group, limits": of_transformers(
        "Mamba2Config",
        num_heads=4,
        head_dim=32,
        n_groups=1,
        state_size=16,
        use_bias=True,
        tie_word_embeddings=True,
    ),
    "jamba": of_transformers("JambaConfig", num_experts=1, attn_layer_period=2, attn_layer_offset=1),
    "jamba, experts": of_transformers(
        "JambaConfig",
        num_experts=6,
        num_experts_per_tok=2,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=0,
    ),
    "bamba": of_transformers("BambaConfig", **MAMBA2, attn_layer_indices=[1]),
    "falcon h1": of_transformers(
        "FalconH1Config",
        **MAMBA2,
        mamba_d_ssm=128,
        ssm_multipliers=[0.9, 1.1, 0.7, 1.3, 0.8],
        mlp_multipliers=[0.8, 1.2],
        key_multiplier=0.7,
        attention_in_multiplier=1.2,
        attention_out_multiplier=0.8,
        ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.9,
        embedding_multiplier=1.5,
        lm_head_multiplier=0.6,
    ),
    "falcon h1, normed": of_transformers(
        "FalconH1Config", **MAMBA2, mamba_d_ssm=128, mamba_rms_norm=True, mamba_norm_before_gate=False
    ),
    "falcon h1, normed first": of_transformers(
        "FalconH1Config", **MAMBA2, mamba_d_ssm=128, mamba_rms_norm=True, mamba_norm_before_gate=True
    ),
    "granite hybrid": of_transformers(
        "GraniteMoeHybridConfig",
        **MAMBA2,
        num_local_experts=0,
        shared_intermediate_size=112,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        embedding_multiplier=1.5,
        residual_multiplier=0.7,
        attention_multiplier=0.3,
        logits_scaling=2.0,
    ),
    "granite hybrid, experts": of_transformers(
        "GraniteMoeHybridConfig",
        **MAMBA2,
        num_local_experts=6,
        num_experts_per_tok=3,
        intermediate_size=40,
        shared_intermediate_size=48,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "granite hybrid, positions": of_transformers(
        "GraniteMoeHybridConfig",
        **MAMBA2,
        num_local_experts=0,
        shared_intermediate_size=112,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        position_embedding_type="rope",
    ),
    "qwen3 next": of_transformers("Qwen3NextConfig", **QWEN_NEXT, num_hidden_layers=4),
    "qwen3 next, biases, some layers without experts": of_transformers(
        "Qwen3NextConfig",
        **QWEN_NEXT,
        layer_types=["full_attention", "linear_attention", "linear_attention"],
        attention_bias=True,
        norm_topk_prob=False,
        mlp_only_layers=[1],
    ),
    "qwen 3.5": of_transformers(
        "Qwen3_5TextConfig",
        **QWEN_DENSE,
        **QWEN_TWO,
        rope_parameters=MROPE,
    ),
    "qwen 3.5, with vision": with_vision(
        of_transformers("Qwen3_5TextConfig", **QWEN_DENSE, **QWEN_TWO),
        "Qwen3_5ForConditionalGeneration",
        "model.language_model.",
    ),
    "qwen-moe 3.5": of_transformers(
        "Qwen3_5MoeTextConfig",
        **QWEN_NEXT,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
    ),
    "nemotron h": of_transformers(
        "NemotronHConfig",
        num_hidden_layers=4,
        layer_types=["linear_attention", "mlp", "full_attention", "linear_attention"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=24,
        head_dim=16,
    ),
    "lfm2": of_transformers("Lfm2Config", layer_types=["conv", "full_attention", "conv"]),
    "lfm2 moe": of_transformers(
        "Lfm2MoeConfig",
        layer_types=["conv", "full_attention", "conv"],
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
    "lfm2, biases, width as it is": of_transformers(
        "Lfm2Config",
        layer_types=["full_attention", "conv", "conv"],
        conv_bias=True,
        block_auto_adjust_ff_dim=False,
        conv_L_cache=4,
    ),
}

_LOADS = (0.97, -1.0)
"""int4 is tested for loading only: the logits change too much. transformers' own Falcon-H1 with matrices rounded by the
same kernel has a similarity of 0.25 on one prompt. Our logits equal its logits to within 0.001.
"""
_CHOOSES = (0.85, -1.0)
"""Four layers of experts with gates after each mixer: transformers' own model with matrices rounded to int8 in the same way
has 0.962 in the first row and 0.87 in the second. Ours are within 0.01 prompt by prompt.
"""
_QUANTIZED = {"granite hybrid": _LOADS, "falcon h1": _LOADS, "qwen3 next": _CHOOSES, "qwen-moe": _CHOOSES}
_NEXT_CLOSE = 6e-4
"""Qwen3-Next's gated delta rule: on one prompt, transformers' fp32 logits differ by 2.4e-4 from its float64 ones, and ours
by torch by 2.5e-4.
"""


def _as_close(name: str, row: Row) -> Row:
    quantized = next((each for begin, each in _QUANTIZED.items() if name.startswith(begin)), (0.97, 0.3))
    return replace(
        row, quantized=quantized, close=_NEXT_CLOSE if name.startswith("qwen3 next") else row.close
    )


ROWS = {name: _as_close(name, row) for name, row in _ROWS.items()}
"""Rounded weights err in exponentials, summed over all previous tokens and multiplied with two gates. The logits of 64
numbers in 3 layers are less similar than those of attention.
"""
