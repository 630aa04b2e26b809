"""Writes a model folder as one GGUF file, as llama.cpp's converter would: what benchmarks and tests compare on.

Names of tensors are those that the `gguf` package has for each architecture. What is not named but made (rows of queries and
keys for neighbours that are rotated, norms with their offset, experts in one tensor) is here. Knows numpy and that package alone,
so that it runs where llama.cpp does.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from bench.gguf_metadata import Config, either, head_dim, kv_heads_of, metadata_of, rope_of

Array = NDArray[Any]
Blocks = Mapping[str, tuple[Array, str]]

ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "gpt2": "gpt2",
    "arcee": "arcee",
    "bloom": "bloom",
    "cohere": "command-r",
    "cohere2": "cohere2",
    "ernie4_5": "ernie4_5",
    "exaone4": "exaone4",
    "falcon": "falcon",
    "glm4": "glm4",
    "gpt_bigcode": "starcoder",
    "gpt_neox": "gptneox",
    "granite": "granite",
    "lfm2": "lfm2",
    "mamba": "mamba",
    "mamba2": "mamba2",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "olmo2": "olmo2",
    "olmo3": "olmo2",
    "olmoe": "olmoe",
    "phi": "phi2",
    "seed_oss": "seed_oss",
    "smollm3": "smollm3",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
"""By the card's model_type."""
_NEIGHBOURS = frozenset({"llama", "arcee", "granite", "olmo", "smollm3"})
"""Architectures where llama.cpp rotates neighbours, and the card's family halves of a head."""
_PRE_TOKENIZERS = {"qwen2": "qwen2", "llama": "llama-bpe"}
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(w[123]|gate_proj|up_proj|down_proj)\.weight")
_NUMBERS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def write_model(folder: Path, target: Path, kind: str = "BF16", blocks: Blocks | None = None) -> None:
    """Write a folder's model with matrices in this format, and its vocabulary. Raises KeyError for a family not known here.

    blocks: by the folder's names, matrices to write instead: uint8 ``[rows, bytes of a row]``, and the name of their type.
    """
    config = json.loads((folder / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(str(target), arch)
    writer.add_file_type(int(gguf.LlamaFileType[f"MOSTLY_{kind}" if kind != "F32" else "ALL_F32"]))
    for key, value in metadata_of(config, arch).items():
        _add(writer, f"{arch}.{key}", value)
    _write_vocabulary(writer, folder, config)
    for name, array in _extra_tensors(config, arch):
        writer.add_tensor(name, array)
    names = gguf.get_tensor_name_map(arch_of(arch), either(config, "num_hidden_layers", "n_layer"))
    blocks = blocks or {}
    for name, array in _tensors(folder, config, arch, names, blocks):
        _write_tensor(writer, name, array, kind)
    for name, (raw, type_name) in blocks.items():
        rows = np.ascontiguousarray(_transformed(name, raw, config, arch))
        writer.add_tensor(renamed(names, name), rows, raw_dtype=gguf.GGMLQuantizationType[type_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_tensor(writer: Any, name: str, array: Array, kind: str) -> None:
    is_matrix = array.ndim > 1 and not name.endswith("ffn_gate_inp.weight")
    type_ = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
    if is_matrix and array.shape[-1] % gguf.GGML_QUANT_SIZES[type_][0]:
        type_ = gguf.GGMLQuantizationType.F16  # as llama.cpp does with rows that are no whole blocks
    writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), type_), raw_dtype=type_)


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case list():
            writer.add_array(key, value)


def _extra_tensors(config: Config, arch: str) -> Iterator[tuple[str, Array]]:
    """Yield what the file has of rope scaling."""
    rope = rope_of(config)
    if rope.get("rope_type") == "llama3":
        yield "rope_freqs.weight", _llama3_factors(config, rope)
    if rope.get("rope_type") == "longrope":
        for which in ("long", "short"):
            yield f"rope_factors_{which}.weight", np.array(rope[f"{which}_factor"], np.float32)


def _llama3_factors(config: Config, rope: Config) -> Array:
    """Return what each frequency is divided by: 1 for the high ones, ``factor`` for the low ones, a blend between."""
    dim, theta = head_dim(config), rope.get("rope_theta") or config["rope_theta"]
    frequencies = theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    wavelengths = 2 * math.pi / frequencies
    original, low, high, factor = (
        rope[key]
        for key in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor", "factor")
    )
    share = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    factors: Array = (1.0 / ((1.0 - share) / factor + share)).astype(np.float32)
    return factors


def _tensors(
    folder: Path, config: Config, arch: str, names: Any, left_out: Container[str]
) -> Iterator[tuple[str, Array]]:
    """Yield the model's tensors by the file's names, in float32."""
    experts: dict[str, dict[int, Array]] = {}
    heads: dict[str, dict[int, Array]] = {}
    for name, array in read_safetensors(folder / "model.safetensors"):
        found = _EXPERT.fullmatch(name)
        if found is not None:
            experts.setdefault(f"{found[1]}.{found[3]}.weight", {})[int(found[2])] = array
            continue
        if "_layernorm.norms." in name:
            stem, _, head = name.removesuffix(".weight").rpartition(".norms.")
            heads.setdefault(f"{stem}.weight", {})[int(head)] = array
            continue
        if name not in left_out and not (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            yield renamed(names, name), _transformed(name, array, config, arch)
    for name, arrays in (experts | heads).items():
        yield renamed(names, name), np.stack([arrays[each] for each in sorted(arrays)])


def _transformed(name: str, array: Array, config: Config, arch: str) -> Array:
    if arch.startswith(("gemma", "nemotron")) and name.endswith("norm.weight"):
        return array + np.float32(1.0)
    if ".query_key_value." in name:
        return _one_after_the_other(array, config)
    if arch in ("mamba", "mamba2", "lfm2"):
        return _of_a_state(name, array, config)
    if arch == "gpt2" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name):
        return array.T
    if arch in _NEIGHBOURS:
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{part}." in name:
                heads = config.get(key) or config["num_attention_heads"]
                halves = array.reshape(heads, 2, head_dim(config) // 2, -1)
                return halves.swapaxes(1, 2).reshape(array.shape)
    return array


def _one_after_the_other(array: Array, config: Config) -> Array:
    """Return all queries, then all keys, then all values, of rows that are grouped by heads of keys."""
    heads, kv_heads = either(config, "num_attention_heads", "n_head"), kv_heads_of(config)
    groups = array.reshape(kv_heads, heads // kv_heads + 2, head_dim(config), *array.shape[1:])
    parts = groups[:, :-2], groups[:, -2:-1], groups[:, -1:]
    return np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])


def _of_a_state(name: str, array: Array, config: Config) -> Array:
    """Return what llama.cpp keeps of a mixer's parameters: how fast a state fades, not its logarithm; no empty dimensions."""
    if name.endswith("A_log"):
        array = -np.exp(array)
    if array.ndim == 3:
        return array.squeeze(1)
    if config["model_type"] == "mamba2" and name.endswith(("A_log", ".D")):
        return array.reshape(-1, 1)
    if config["model_type"] == "mamba2" and name.endswith("mixer.norm.weight"):
        return array.reshape(config["n_groups"], -1)
    return array


def renamed(names: Any, name: str) -> str:
    """Return the file's name of a folder's tensor. Raises KeyError for a tensor that the architecture has no place for."""
    name = name.replace(".dt_bias", ".dt_proj.bias")
    name = name if name.startswith(("model.", "lm_head.", "transformer.")) else f"transformer.{name}"
    for spelled in (
        name,
        name.replace("block_sparse_moe.experts.", "block_sparse_moe.experts."),
        name.removeprefix("transformer."),
    ):
        found = names.get_name(spelled, try_suffixes=(".weight", ".bias"))
        if found is not None:
            return str(found)
    raise KeyError(name)


def read_safetensors(path: Path) -> Iterator[tuple[str, Array]]:
    """Yield the tensors of a safetensors file as float32: 8 bytes of header length, a JSON header, the numbers."""
    file = np.memmap(path, dtype=np.uint8, mode="r")
    header_bytes = int(file[:8].view(np.uint64)[0])
    header = json.loads(bytes(file[8 : 8 + header_bytes]))
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        numbers = np.frombuffer(file[start:end].tobytes(), _NUMBERS[entry["dtype"]]).reshape(entry["shape"])
        yield name, _to_float(numbers)


def _to_float(numbers: Array) -> Array:
    if numbers.dtype == np.uint16:
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)


def _write_vocabulary(writer: Any, folder: Path, config: Config) -> None:
    """Write the folder's byte pairs; of a folder without any, names of the ids."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = range(config["vocab_size"])
    vocab = tokenizer["model"]["vocab"] if "model" in tokenizer else {f"token{i}": i for i in ids}
    special = {entry["id"]: entry["content"] for entry in tokenizer.get("added_tokens", ())}
    by_id = {index: token for token, index in vocab.items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_PRE_TOKENIZERS.get(config["model_type"], "default"))
    writer.add_token_list([by_id.get(i, f"[PAD{i}]") for i in ids])
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    unused = int(gguf.TokenType.UNUSED)
    writer.add_token_types([control if i in special else normal if i in by_id else unused for i in ids])
    merges = tokenizer["model"]["merges"] if "model" in tokenizer else []
    spelled = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    writer.add_token_merges(spelled or ["t o"])  # llama.cpp asks for one at least
    for key in ("eos", "bos"):
        token = config.get(f"{key}_token_id")
        if isinstance(token, int) and 0 <= token < config["vocab_size"]:
            writer.add_uint32(f"tokenizer.ggml.{key}_token_id", token)
    writer.add_add_bos_token(False)
    if (folder / "chat_template.jinja").is_file():
        writer.add_chat_template((folder / "chat_template.jinja").read_text())


def arch_of(name: str) -> Any:
    """Return the `gguf` package's architecture of that name."""
    return next(arch for arch, each in gguf.MODEL_ARCH_NAMES.items() if each == name)
