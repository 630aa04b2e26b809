"""Models without a row in the registry: transformers computes them, over our KV memory."""

from tests.models.random_checkpoints import Row, of_transformers

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}

ROWS: dict[str, Row] = {
    "apertus: norms of heads, a learned activation": of_transformers("ApertusConfig"),
    "helium: interleaved rotation": of_transformers("HeliumConfig", head_dim=16, head_dim_original=16),
    "cwm: windows in some layers": of_transformers("CwmConfig", head_dim=16, sliding_window=11),
    "vaultgemma: soft caps, windows, scaled embeddings": of_transformers(
        "VaultGemmaConfig", head_dim=16, query_pre_attn_scalar=16, sliding_window=11
    ),
    "youtu: keys and values of different widths": of_transformers("YoutuConfig", **LATENT),
    "cohere2 moe: experts, layers without rotation": of_transformers(
        "Cohere2MoeConfig", num_experts=4, num_experts_per_tok=2, sliding_window=11, head_dim=16
    ),
    "granite with windows: sinks": of_transformers("GraniteSWAConfig", sliding_window=11),
    "gpt-2 as transformers has it": of_transformers("GPT2Config"),
}
