"""Write the null model: a tiny random Qwen2 checkpoint with a large vocabulary, for benchmarks of all other components.

Qwen2 architecture, 2 layers, hidden size 128, vocabulary of 33,024 tokens, seeded random weights. The byte-level BPE tokenizer
has exactly that vocabulary. It is constructed, not trained: 256 bytes, then pairs of letters, then words of two such pairs. The
folder loads in transformers and in other servers. Needs no network.

    python bench/null_model.py OUT_DIR
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel

from bench.arguments import command_parser

VOCAB_SIZE = 33_024
HIDDEN, LAYERS, HEADS, KV_HEADS, INTERMEDIATE = 128, 2, 4, 2, 512
MAX_LEN = 4096
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_null_model(folder: Path, seed: int = 0) -> Path:
    """Write the model into ``folder`` and return it. The same seed writes the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, VOCAB_SIZE, MAX_LEN)
    save_file(_weights(seed), folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "max_position_embeddings": MAX_LEN,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "bos_token_id": VOCAB_SIZE - len(SPECIALS),
        "eos_token_id": VOCAB_SIZE - len(SPECIALS),
    }
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {"eos_token_id": VOCAB_SIZE - len(SPECIALS), "bos_token_id": VOCAB_SIZE - len(SPECIALS)},
    )
    return folder


def _weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    head_dim = HIDDEN // HEADS

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.02).to(torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB_SIZE, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows in (
            ("q_proj", HEADS * head_dim),
            ("k_proj", KV_HEADS * head_dim),
            ("v_proj", KV_HEADS * head_dim),
        ):
            weights[f"{prefix}self_attn.{name}.weight"] = normal(rows, HIDDEN)
            weights[f"{prefix}self_attn.{name}.bias"] = normal(rows)
        weights[f"{prefix}self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * head_dim)
        weights[f"{prefix}mlp.gate_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}mlp.up_proj.weight"] = normal(INTERMEDIATE, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = normal(HIDDEN, INTERMEDIATE)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    return weights


def write_tokenizer(folder: Path, vocab_size: int, max_len: int) -> None:
    """Write a byte-level BPE tokenizer of exactly ``vocab_size`` tokens, the last three of them special.

    At most 458,000 tokens: then there are no more words of four letters.
    """
    vocab, merges = _vocabulary(vocab_size - len(SPECIALS))
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    assert tokenizer.get_vocab_size() == vocab_size, tokenizer.get_vocab_size()
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": max_len,
            "bos_token": None,
            "eos_token": SPECIALS[0],
            "pad_token": SPECIALS[0],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _vocabulary(size: int) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Return ``size`` tokens and their merges: bytes, letter pairs, then four letters after a space."""
    tokens = sorted(ByteLevel.alphabet())
    space = "Ġ"
    pairs = [(a, b) for a in LETTERS for b in LETTERS]
    merges = list(pairs)
    tokens += [a + b for a, b in pairs]
    spaced = [(space, a + b) for a, b in pairs]
    merges += spaced
    tokens += [a + b for a, b in spaced]
    doubles = itertools.islice(
        itertools.product([a + b for a, b in spaced], [a + b for a, b in pairs]), size - len(tokens)
    )
    for first, second in doubles:
        merges.append((first, second))
        tokens.append(first + second)
    return {token: index for index, token in enumerate(tokens)}, merges


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """Write the model into the folder of the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(make_null_model(arguments.folder, arguments.seed))


if __name__ == "__main__":
    main()
