"""Write large models as GGUF files with random blocks.

L has the shape of Llama-3.1-8B. E has that of gpt-oss-20b with 8 of its 24 layers: experts in MXFP4, all other tensors in 8 bits,
as in its published files.

Random bytes are written as quantized blocks, a few megabytes at a time. Their scales give the weights a mean of 0 and a standard
deviation of about 0.02. In a Q4_K_M file, the same tensors have Q6_K as in llama.cpp.

    python -m bench.peers.random_gguf FOLDER                            writes FOLDER/L-q4_k_m.gguf (4.9 GB)
    python -m bench.peers.random_gguf FOLDER --type q8_0                8.5 GB
    python -m bench.peers.random_gguf FOLDER --model E --type mxfp4     4.9 GB
    python -m bench.peers.random_gguf FOLDER --layers 2                 a file with fewer layers
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from bench.arguments import command_parser
from bench.null_model import SPECIALS, write_tokenizer
from quintet.deploy.config.gguf.vocabulary import vocabulary_of
from quintet.executor.checkpoints.gguf.writing.hf_config import Config
from quintet.executor.checkpoints.gguf.writing.metadata import metadata_of
from quintet.executor.checkpoints.gguf.writing.model import add_value
from quintet.executor.checkpoints.gguf.writing.type_mixes import MIXES, Model, type_of

Bytes = NDArray[np.uint8]

_L: Config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "head_dim": 128,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "vocab_size": 128_256,
}
_E: Config = {
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 15e4,
    "vocab_size": 201_088,
}
CONFIGS: dict[str, Config] = {"L": _L, "E": _E}
KINDS: dict[str, tuple[str, ...]] = {"L": ("q4_k_m", "q8_0"), "E": ("mxfp4",)}
"""File types of each model."""
_ARCHITECTURES = {"llama": "llama", "gpt_oss": "gpt-oss"}
_CHUNK_BYTES = 1 << 24
_OTHER_FILE_TYPES = {"mxfp4": (gguf.LlamaFileType.MOSTLY_MXFP4_MOE, "q8_0")}
"""File types that `quintet quantize` does not write: GGUF file type, and the mix of all tensors but experts."""


@dataclass(frozen=True, slots=True)
class _Constant:
    """Constant bytes at an offset of each block: its scale."""

    offset: int
    value: bytes


def _half(value: float) -> bytes:
    return np.float16(value).tobytes()


_SCALES = {
    # d and d_min: scales and minima are up to 63, codes up to 15, so minima 7.5 times as large even out.
    "Q4_K": (_Constant(0, _half(2.0**-14)), _Constant(2, _half(7.5 * 2.0**-14))),
    "Q6_K": (_Constant(208, _half(2.0**-16)),),
    "Q8_0": (_Constant(0, _half(2.0**-12)),),
    "MXFP4": (_Constant(0, bytes([127 - 7])),),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    type_name: str


def write_random(target: Path, kind: str, config: Config, seed: int = 0) -> Path:
    """Write the file if it is missing, and return it. The same seed writes the same file."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    arch = _ARCHITECTURES[config["model_type"]]
    end = config["vocab_size"] - len(SPECIALS)
    full_config = config | _sliding(config) | {"bos_token_id": end, "eos_token_id": end}
    writer = gguf.GGUFWriter(str(partial), arch)
    file_type, _ = _OTHER_FILE_TYPES.get(kind, (None, kind))
    writer.add_file_type(int(file_type or gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]))
    for key, value in metadata_of(full_config, arch).items():
        add_value(writer, f"{arch}.{key}", value)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), config["vocab_size"], config["max_position_embeddings"])
        (Path(folder) / "config.json").write_text(json.dumps(full_config))
        for key, value in vocabulary_of(Path(folder), Path(folder), config["vocab_size"]).items():
            add_value(writer, key, value)
    tensors = list(_tensors(config, kind))
    for tensor in tensors:
        type_ = gguf.GGMLQuantizationType[tensor.type_name]
        num_bytes = (
            int(np.prod(tensor.shape)) // gguf.GGML_QUANT_SIZES[type_][0] * gguf.GGML_QUANT_SIZES[type_][1]
        )
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), num_bytes, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    _append(partial, tensors, seed)
    partial.rename(target)  # the final name marks the file as complete
    return target


def _sliding(config: Config) -> Config:
    """Return the attention type of each layer: in gpt-oss, every other layer has a sliding window."""
    if "sliding_window" not in config:
        return {}
    kinds = ("sliding_attention", "full_attention")
    return {"layer_types": [kinds[layer % 2] for layer in range(config["num_hidden_layers"])]}


def _tensors(config: Config, kind: str) -> Iterator[_Tensor]:
    heads = config["num_attention_heads"] // config["num_key_value_heads"]
    model = Model(config["num_hidden_layers"], is_tied=False, heads_per_kv=heads)
    _, mix = _OTHER_FILE_TYPES.get(kind, (None, kind))
    for name, shape in _shapes(config):
        is_expert = name.endswith("_exps.weight")
        yield _Tensor(
            name, shape, kind.upper() if is_expert else type_of(MIXES[mix], name, shape, model).name
        )


def _shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden = config["hidden_size"]
    yield "token_embd.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, shape in (_routed if "num_local_experts" in config else _dense)(config).items():
            yield f"blk.{layer}.{name}", shape
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (config["vocab_size"], hidden)


def _attention(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, width = config["hidden_size"], config["head_dim"]
    queries, kv = (config[key] * width for key in ("num_attention_heads", "num_key_value_heads"))
    return {
        "attn_norm.weight": (hidden,),
        "attn_q.weight": (queries, hidden),
        "attn_k.weight": (kv, hidden),
        "attn_v.weight": (kv, hidden),
        "attn_output.weight": (hidden, queries),
    }


def _dense(config: Config) -> dict[str, tuple[int, ...]]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    return _attention(config) | {
        "ffn_norm.weight": (hidden,),
        "ffn_gate.weight": (wide, hidden),
        "ffn_up.weight": (wide, hidden),
        "ffn_down.weight": (hidden, wide),
    }


def _routed(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the tensors of a gpt-oss layer; all matrices have biases, and attention has sinks."""
    hidden, wide, experts = (config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))
    matrices = _attention(config) | {
        "ffn_gate_inp.weight": (experts, hidden),
        "ffn_gate_exps.weight": (experts, wide, hidden),
        "ffn_up_exps.weight": (experts, wide, hidden),
        "ffn_down_exps.weight": (experts, hidden, wide),
    }
    biases = {
        name.replace("weight", "bias"): shape[:-1] for name, shape in matrices.items() if len(shape) > 1
    }
    norms = {"post_attention_norm.weight": (hidden,), "attn_sinks.weight": (config["num_attention_heads"],)}
    return matrices | biases | norms


def _append(path: Path, tensors: list[_Tensor], seed: int) -> None:
    """Write the tensors' bytes after their description, each at a multiple of the alignment."""
    generator, alignment = np.random.default_rng(seed), gguf.GGUF_DEFAULT_ALIGNMENT
    with path.open("ab") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % alignment))
            for chunk in _chunks(tensor, generator):
                file.write(chunk.data)
        file.write(bytes(-file.tell() % alignment))


def _chunks(tensor: _Tensor, generator: np.random.Generator) -> Iterator[Bytes]:
    if tensor.type_name == "F32":
        is_norm = tensor.name.endswith("norm.weight")
        numbers = np.ones(tensor.shape) if is_norm else generator.normal(0, 0.02, tensor.shape)
        yield numbers.astype(np.float32).view(np.uint8).reshape(-1)
        return
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type_name]]
    left, most = int(np.prod(tensor.shape)) // block, _CHUNK_BYTES // size
    while left:
        count = min(left, most)
        words = generator.integers(0, 1 << 64, (count * size + 7) // 8, np.uint64, endpoint=False)
        blocks = words.view(np.uint8)[: count * size].reshape(count, size)
        for factor in _SCALES[tensor.type_name]:
            blocks[:, factor.offset : factor.offset + len(factor.value)] = np.frombuffer(
                factor.value, np.uint8
            )
        yield blocks.reshape(-1)
        left -= count


def main() -> None:
    """Write the file into the folder of the command line."""
    parser = command_parser(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=CONFIGS, default="L")
    parser.add_argument(
        "--type", choices=[kind for kinds in KINDS.values() for kind in kinds], metavar="TYPE"
    )
    parser.add_argument("--layers", type=int, help="number of layers (default: the model's)")
    arguments = parser.parse_args()
    kind = arguments.type or KINDS[arguments.model][0]
    if kind not in KINDS[arguments.model]:
        parser.error(
            f"--type is {kind}; model {arguments.model} allows {' or '.join(KINDS[arguments.model])}"
        )
    config = CONFIGS[arguments.model]
    name = f"{arguments.model}{arguments.layers or ''}"
    layers = {"num_hidden_layers": arguments.layers or config["num_hidden_layers"]}
    print(write_random(arguments.folder / f"{name}-{kind}.gguf", kind, config | layers))


if __name__ == "__main__":
    main()
