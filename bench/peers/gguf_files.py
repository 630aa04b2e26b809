"""Writes a model folder as GGUF files: bf16 as it is, q8_0 and q4_0 by llama.cpp's own quantizer.

Runs in the environment of llama-cpp-python. Knows the two architectures of `bench.peers.models` and no others. Metadata and
tensor names are those of the GGUF specification; of Llama, rows of q and k are reordered because llama.cpp rotates
neighbouring pairs there, and the frequency factors of its rope scaling are a tensor (Llama 3.1's published formula).

    python -m bench.peers.gguf_files MODEL_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray

_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_PRE_TOKENIZERS = {"qwen2": "qwen2", "llama": "llama-bpe"}
QUANTIZED = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def write_bf16(model: Path, target: Path) -> None:
    """Write ``model`` as one bf16 file."""
    config = json.loads((model / "config.json").read_text())
    kind = str(config["model_type"])
    writer = gguf.GGUFWriter(str(target), kind)
    _write_shape(writer, config)
    _write_vocabulary(writer, model, config)
    if "rope_scaling" in config:
        factors = _rope_factors(config)
        writer.add_tensor("rope_freqs.weight", factors)
    for name, raw in _bf16_tensors(model / "model.safetensors").items():
        ours = _renamed(name)
        rows = _reordered(raw, name, config) if kind == "llama" else raw
        if rows.ndim == 1:
            writer.add_tensor(ours, _to_float(rows))
        else:
            content = np.ascontiguousarray(rows).view(np.uint8)
            writer.add_tensor(ours, content, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, target: Path, ftype: int) -> None:
    """Write ``source`` in another number format. Raises `RuntimeError` where llama.cpp cannot."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = ftype
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(target).encode(), ctypes.byref(params))
    if status != 0:
        raise RuntimeError(f"llama_model_quantize({source}, {target}, {ftype}) returned {status}")


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_file_type(llama_cpp.LLAMA_FTYPE_MOSTLY_BF16)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(_head_dim(config))
    writer.add_vocab_size(config["vocab_size"])


def _write_vocabulary(writer: Any, model: Path, config: dict[str, Any]) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    by_id = {index: token for token, index in tokenizer["model"]["vocab"].items()}
    special = {entry["id"]: entry["content"] for entry in tokenizer["added_tokens"]}
    by_id |= special
    ids = range(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZERS[config["model_type"]])
    writer.add_token_list([by_id[i] for i in ids])
    writer.add_token_types(
        [int(gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL) for i in ids]
    )
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_add_bos_token(False)


def _bf16_tensors(path: Path) -> dict[str, NDArray[np.uint16]]:
    """Map the tensors of a safetensors file of bf16 alone: 8 bytes of header length, a JSON header, the numbers."""
    file = np.memmap(path, dtype=np.uint8, mode="r")
    header_bytes = int(file[:8].view(np.uint64)[0])
    header = json.loads(bytes(file[8 : 8 + header_bytes]))
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16", (name, entry["dtype"])
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        tensors[name] = np.frombuffer(file[start:end].tobytes(), dtype=np.uint16).reshape(entry["shape"])
    return tensors


def _renamed(name: str) -> str:
    if not name.startswith("model.layers."):
        return {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[
            name
        ]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    if rest in _LAYER_NAMES:
        return f"blk.{layer}.{_LAYER_NAMES[rest]}"
    module, _, leaf = rest.rpartition(".")
    return f"blk.{layer}.{_LAYER_NAMES[module]}.{leaf}"


def _reordered(raw: NDArray[np.uint16], name: str, config: dict[str, Any]) -> NDArray[np.uint16]:
    """Interleave the two halves of each head's rows in q and k, so that rotated pairs become neighbours."""
    if name.endswith("q_proj.weight"):
        heads = config["num_attention_heads"]
    elif name.endswith("k_proj.weight"):
        heads = config["num_key_value_heads"]
    else:
        return raw
    halves = raw.reshape(heads, 2, _head_dim(config) // 2, raw.shape[1])
    return halves.swapaxes(1, 2).reshape(raw.shape)


def _rope_factors(config: dict[str, Any]) -> NDArray[np.float32]:
    """Return what each frequency is divided by: 1 for the high ones, ``factor`` for the low ones, a blend between."""
    scaling = config["rope_scaling"]
    assert scaling["rope_type"] == "llama3", scaling
    dim = _head_dim(config)
    frequencies = config["rope_theta"] ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    wavelengths = 2 * math.pi / frequencies
    original, low, high, factor = (
        scaling[key]
        for key in (
            "original_max_position_embeddings",
            "low_freq_factor",
            "high_freq_factor",
            "factor",
        )
    )
    share = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: NDArray[np.float32] = (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)
    return factors


def _to_float(raw: NDArray[np.uint16]) -> NDArray[np.float32]:
    return (raw.astype(np.uint32) << 16).view(np.float32)


def _head_dim(config: dict[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def main() -> None:
    """Write every format that is not there yet."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = arguments.model.name
    plain: Path = arguments.out / f"{name}-bf16.gguf"
    for precision in ("bf16", *QUANTIZED):
        target = arguments.out / f"{name}-{precision}.gguf"
        if target.exists():
            continue
        partial = target.with_suffix(".partial")
        if precision == "bf16":
            write_bf16(arguments.model, partial)
        else:
            quantize(plain, partial, QUANTIZED[precision])
        partial.rename(target)
        print(target, flush=True)


if __name__ == "__main__":
    main()
