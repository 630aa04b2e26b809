"""Writes the third model that engines are measured with, L: the shape of Llama-3.1-8B as one GGUF file of random blocks.

Nothing is quantized: blocks are made as they lie in the file, with scales that give weights a standard deviation of about 0.02
around 0, a few megabytes at a time. Which tensors of a Q4_K_M file have Q6_K is llama.cpp's choice for this shape.

    python -m bench.peers.large FOLDER                  writes FOLDER/L-q4_k_m.gguf (4.9 GB)
    python -m bench.peers.large FOLDER --type q8_0      8.5 GB
    python -m bench.peers.large FOLDER --layers 2       a file of fewer layers
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from bench.null_model import SPECIALS, write_tokenizer
from quintet.deploy.resolve.gguf.vocabulary import vocabulary_of
from quintet.executor.gguf.writing.card import Config
from quintet.executor.gguf.writing.metadata import metadata_of
from quintet.executor.gguf.writing.mixes import MIXES, Model, type_of
from quintet.executor.gguf.writing.model import add_value

Bytes = NDArray[np.uint8]

CONFIG: Config = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "vocab_size": 128_256,
    "bos_token_id": 128_256 - len(SPECIALS),
    "eos_token_id": 128_256 - len(SPECIALS),
}
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class _Factor:
    """An fp16 number at a place of every block."""

    offset: int
    value: float


_FACTORS = {
    # d and d_min: scales and minima are up to 63, codes up to 15, so minima 7.5 times as large even out.
    "Q4_K": (_Factor(0, 2.0**-14), _Factor(2, 7.5 * 2.0**-14)),
    "Q6_K": (_Factor(208, 2.0**-16),),
    "Q8_0": (_Factor(0, 2.0**-12),),
}


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    shape: tuple[int, ...]
    type_name: str


def write_large(target: Path, kind: str = "q4_k_m", config: Config = CONFIG, seed: int = 0) -> Path:
    """Write the file unless it is there, and return it. The same seed writes the same file."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(str(partial), "llama")
    writer.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{kind.upper()}"]))
    for key, value in metadata_of(config, "llama").items():
        add_value(writer, f"llama.{key}", value)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), config["vocab_size"], config["max_position_embeddings"])
        (Path(folder) / "config.json").write_text(json.dumps(config))
        for key, value in vocabulary_of(Path(folder), Path(folder)).items():
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
    partial.rename(target)  # last: its name says that it is whole
    return target


def _tensors(config: Config, kind: str) -> Iterator[_Tensor]:
    heads = config["num_attention_heads"] // config["num_key_value_heads"]
    model = Model(config["num_hidden_layers"], is_tied=False, heads_per_kv=heads)
    for name, shape in _shapes(config):
        yield _Tensor(name, shape, type_of(MIXES[kind], name, shape, model).name)


def _shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    yield "token_embd.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"blk.{layer}."
        yield f"{prefix}attn_norm.weight", (hidden,)
        yield f"{prefix}attn_q.weight", (hidden, hidden)
        yield f"{prefix}attn_k.weight", (kv, hidden)
        yield f"{prefix}attn_v.weight", (kv, hidden)
        yield f"{prefix}attn_output.weight", (hidden, hidden)
        yield f"{prefix}ffn_norm.weight", (hidden,)
        yield f"{prefix}ffn_gate.weight", (wide, hidden)
        yield f"{prefix}ffn_up.weight", (wide, hidden)
        yield f"{prefix}ffn_down.weight", (hidden, wide)
    yield "output_norm.weight", (hidden,)
    yield "output.weight", (config["vocab_size"], hidden)


def _append(path: Path, tensors: list[_Tensor], seed: int) -> None:
    """Write the tensors' bytes behind what the file says of them, each at a multiple of the alignment."""
    generator, alignment = np.random.default_rng(seed), gguf.GGUF_DEFAULT_ALIGNMENT
    with path.open("ab") as file:
        for tensor in tensors:
            file.write(bytes(-file.tell() % alignment))
            for chunk in _chunks(tensor, generator):
                file.write(chunk.data)
        file.write(bytes(-file.tell() % alignment))


def _chunks(tensor: _Tensor, generator: np.random.Generator) -> Iterator[Bytes]:
    if tensor.type_name == "F32":
        yield np.ones(tensor.shape, np.float32).view(np.uint8)
        return
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[tensor.type_name]]
    left, most = int(np.prod(tensor.shape)) // block, _CHUNK_BYTES // size
    while left:
        count = min(left, most)
        words = generator.integers(0, 1 << 64, (count * size + 7) // 8, np.uint64, endpoint=False)
        blocks = words.view(np.uint8)[: count * size].reshape(count, size)
        for factor in _FACTORS[tensor.type_name]:
            blocks[:, factor.offset : factor.offset + 2] = np.array([factor.value], np.float16).view(np.uint8)
        yield blocks.reshape(-1)
        left -= count


def main() -> None:
    """Write the file where the command line says."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--type", choices=("q4_k_m", "q8_0"), default="q4_k_m")
    parser.add_argument("--layers", type=int, default=CONFIG["num_hidden_layers"])
    arguments = parser.parse_args()
    config = CONFIG | {"num_hidden_layers": arguments.layers}
    name = "L" if config == CONFIG else f"L{arguments.layers}"
    print(write_large(arguments.folder / f"{name}-{arguments.type}.gguf", arguments.type, config))


if __name__ == "__main__":
    main()
