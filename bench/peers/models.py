"""Write the two models that all engines are measured with: real shapes, seeded random bf16 weights.

The time of a token depends on the shape alone, so random weights suffice and need no network. The tokenizer is that of the null
model with the shape's vocabulary. The folders load in transformers.

    python -m bench.peers.models FOLDER        writes FOLDER/S and FOLDER/M (3.4 GB)
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.arguments import command_parser
from bench.null_model import SPECIALS, write_tokenizer

MAX_LEN = 4096


@dataclass(frozen=True, slots=True)
class Shape:
    """Shape of a Llama-like decoder with tied embeddings."""

    name: str
    like: str
    architecture: str
    model_type: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab_size: int
    rope_theta: float
    rms_norm_eps: float
    qkv_bias: bool
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


SHAPES = {
    "S": Shape(
        "S", "Qwen2.5-0.5B", "Qwen2ForCausalLM", "qwen2", 896, 24, 14, 2, 4864, 151_936, 1e6, 1e-6, True,
        {"use_sliding_window": False},
    ),
    "M": Shape(
        "M", "Llama-3.2-1B", "LlamaForCausalLM", "llama", 2048, 16, 32, 8, 8192, 128_256, 5e5, 1e-5, False,
        {
            "head_dim": 64,
            "attention_bias": False,
            "mlp_bias": False,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
}  # fmt: skip


def make_model(folder: Path, shape: Shape, seed: int = 0) -> Path:
    """Write the model into ``folder`` if it is missing or incomplete, and return it. The same seed writes the same files."""
    done = folder / "config.json"
    if done.exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, shape.vocab_size, MAX_LEN)
    save_file(_weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})
    end = shape.vocab_size - len(SPECIALS)
    _write_json(folder / "generation_config.json", {"bos_token_id": end, "eos_token_id": end})
    config: dict[str, object] = {
        "architectures": [shape.architecture],
        "model_type": shape.model_type,
        "hidden_act": "silu",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": shape.vocab_size,
        "bos_token_id": end,
        "eos_token_id": end,
    }
    _write_json(done, config | shape.extra)  # written last, to mark the folder as complete
    return folder


def _weights(shape: Shape, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * 0.02).to(torch.bfloat16)

    def ones() -> torch.Tensor:
        return torch.ones(shape.hidden, dtype=torch.bfloat16)

    q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    weights = {
        "model.embed_tokens.weight": normal(shape.vocab_size, shape.hidden),
        "model.norm.weight": ones(),
    }
    for layer in range(shape.layers):
        attention, mlp = f"model.layers.{layer}.self_attn.", f"model.layers.{layer}.mlp."
        for name, rows in (("q_proj", q_rows), ("k_proj", kv_rows), ("v_proj", kv_rows)):
            weights[f"{attention}{name}.weight"] = normal(rows, shape.hidden)
            if shape.qkv_bias:
                weights[f"{attention}{name}.bias"] = normal(rows)
        weights[f"{attention}o_proj.weight"] = normal(shape.hidden, q_rows)
        weights[f"{mlp}gate_proj.weight"] = normal(shape.intermediate, shape.hidden)
        weights[f"{mlp}up_proj.weight"] = normal(shape.intermediate, shape.hidden)
        weights[f"{mlp}down_proj.weight"] = normal(shape.hidden, shape.intermediate)
        weights[f"model.layers.{layer}.input_layernorm.weight"] = ones()
        weights[f"model.layers.{layer}.post_attention_layernorm.weight"] = ones()
    return weights


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Write both models into the folder of the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, shape in SHAPES.items():
        print(make_model(arguments.folder / name, shape, arguments.seed))


if __name__ == "__main__":
    main()
