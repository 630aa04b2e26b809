"""Families whose classes transformers no longer has."""

from tests.models.random_checkpoints import Row, of_module
from tests.models.references.baichuan import Baichuan
from tests.models.references.internlm2 import InternLM2
from tests.models.references.llama_shaped import LlamaShaped
from tests.models.references.qwen1 import Qwen1

_CARD = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_7B = _CARD | {
    "architectures": ["BaiChuanForCausalLM"],
    "model_type": "baichuan",
    "max_position_embeddings": 256,
}
_13B = _CARD | {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "model_max_length": 256}

ROWS: dict[str, Row] = {
    "baichuan 7b": of_module(_7B, Baichuan),
    "baichuan 13b": of_module(_13B | {"hidden_size": 80, "num_attention_heads": 5}, Baichuan),
    "baichuan 2 7b": of_module(
        _7B | {"architectures": ["BaichuanForCausalLM"], "z_loss_weight": 0}, Baichuan
    ),
    "internlm": of_module(
        _CARD
        | {
            "architectures": ["InternLMForCausalLM"],
            "model_type": "internlm",
            "bias": True,
            "max_position_embeddings": 256,
            "rotary": {"base": 10000, "type": "dynamic"},
        },
        LlamaShaped,
    ),
    "internlm2": of_module(
        _CARD
        | {
            "architectures": ["InternLM2ForCausalLM"],
            "model_type": "internlm2",
            "bias": False,
            "max_position_embeddings": 256,
            "num_key_value_heads": 2,
            "rope_theta": 1000000,
            "rope_scaling": {"type": "dynamic", "factor": 2.0},
        },
        InternLM2,
    ),
    "aquila": of_module(
        _CARD
        | {
            "architectures": ["AquilaModel"],
            "model_type": "aquila",
            "max_position_embeddings": 256,
            "num_key_value_heads": 2,
        },
        LlamaShaped,
    ),
    "qwen 1": of_module(
        {
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
        },
        Qwen1,
    ),
}
