"""Families that transformers no longer has."""

from tests.models.checkpoints.renamed import renamed
from tests.models.random_checkpoints import Row, of_module, of_transformers
from tests.models.references.baichuan import Baichuan
from tests.models.references.internlm2 import InternLM2
from tests.models.references.llama_shaped import LlamaShaped
from tests.models.references.qwen1 import Qwen1

_HF_CONFIG = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_7B = _HF_CONFIG | {
    "architectures": ["BaiChuanForCausalLM"],
    "model_type": "baichuan",
    "max_position_embeddings": 256,
}
HF_CONFIG_13B = _HF_CONFIG | {
    "architectures": ["BaichuanForCausalLM"],
    "model_type": "baichuan",
    "model_max_length": 256,
}

QWEN_1 = {
    "architectures": ["QWenLMHeadModel"],
    "model_type": "qwen",
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 224,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "kv_channels": 16,
    "layer_norm_epsilon": 1e-6,
    "max_position_embeddings": 512,
    "seq_length": 256,
    "rotary_emb_base": 10000,
    "rotary_pct": 1.0,
    "no_bias": True,
    "use_dynamic_ntk": True,
    "use_logn_attn": True,
    "tie_word_embeddings": False,
}

INTERNLM2 = _HF_CONFIG | {
    "architectures": ["InternLM2ForCausalLM"],
    "model_type": "internlm2",
    "bias": False,
    "max_position_embeddings": 256,
    "num_key_value_heads": 2,
    "rope_theta": 1000000,
    "rope_scaling": {"type": "dynamic", "factor": 2.0},
}

ROWS: dict[str, Row] = {
    "baichuan 7b": of_module(_7B, Baichuan),
    "baichuan 13b": of_module(HF_CONFIG_13B | {"hidden_size": 80, "num_attention_heads": 5}, Baichuan),
    "baichuan 2 7b": of_module(
        _7B | {"architectures": ["BaichuanForCausalLM"], "z_loss_weight": 0}, Baichuan
    ),
    "internlm": of_module(
        _HF_CONFIG
        | {
            "architectures": ["InternLMForCausalLM"],
            "model_type": "internlm",
            "bias": True,
            "max_position_embeddings": 256,
            "rotary": {"base": 10000, "type": "dynamic"},
        },
        LlamaShaped,
    ),
    "internlm2": of_module(INTERNLM2, InternLM2),
    "exaone 3": renamed(
        of_transformers("LlamaConfig"),
        {
            "architectures": ["ExaoneForCausalLM"],
            "num_layers": 3,
            "activation_function": "silu",
            "layer_norm_epsilon": 1e-6,
        },
        (
            (r"^model\.embed_tokens", "transformer.wte"),
            (r"^model\.norm", "transformer.ln_f"),
            (r"^model\.layers", "transformer.h"),
            (r"self_attn\.o_proj", "attn.attention.out_proj"),
            ("self_attn", "attn.attention"),
            ("input_layernorm", "ln_1"),
            ("post_attention_layernorm", "ln_2"),
            ("gate_proj", "c_fc_0"),
            ("up_proj", "c_fc_1"),
            ("down_proj", "c_proj"),
        ),
    ),
    "chatglm": renamed(
        of_transformers("GlmConfig", head_dim=32, pad_token_id=0, rms_norm_eps=1e-5),
        {
            "architectures": ["ChatGLMModel"],
            "padded_vocab_size": 211,
            "num_layers": 3,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
            "kv_channels": 32,
            "ffn_hidden_size": 112,
            "seq_length": 256,
            "layernorm_epsilon": 1e-5,
            "add_qkv_bias": True,
            "torch_dtype": "float32",
        },
        (
            (r"^model\.embed_tokens", "transformer.embedding.word_embeddings"),
            (r"^model\.norm", "transformer.encoder.final_layernorm"),
            (r"^model\.layers", "transformer.encoder.layers"),
            ("lm_head", "transformer.output_layer"),
            (r"self_attn\.o_proj", "self_attention.dense"),
            ("gate_up_proj", "dense_h_to_4h"),
            ("down_proj", "dense_4h_to_h"),
        ),
        {
            f"self_attention.query_key_value.{kind}": [f"self_attn.{part}_proj.{kind}" for part in "qkv"]
            for kind in ("weight", "bias")
        },
        whole_hf_config=True,
    ),
    "tele-flm": renamed(
        of_transformers(
            "GraniteConfig", embedding_multiplier=3.0, logits_scaling=5.0, attention_multiplier=0.25
        ),
        {
            "architectures": ["TeleFLMForCausalLM"],
            "use_mup": True,
            "input_mult": 3.0,
            "output_mult": 0.4,
            "mup_scale_factor": 2.0,
        },
    ),
    "aquila": of_module(
        _HF_CONFIG
        | {
            "architectures": ["AquilaModel"],
            "model_type": "aquila",
            "max_position_embeddings": 256,
            "num_key_value_heads": 2,
        },
        LlamaShaped,
    ),
    "qwen 1": of_module(QWEN_1, Qwen1),
}
