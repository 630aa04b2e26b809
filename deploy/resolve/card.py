"""The few numbers of a model folder's JSON files that serving needs.

Knows the spellings of ``config.json``; not the weights (see `weights`) nor where the folder comes from (see `source`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quintet.wire.errors import ConfigError

Dtype = Literal["bfloat16", "float16", "float32"]
Json = dict[str, object]

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")
_ALREADY_EXTENDED_ROPE = ("default", "llama3", "longrope", "su")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")
_SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a model says about itself."""

    path: Path
    architecture: str
    dtype: Dtype
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    fixed_rope_len: int | None
    """Sequences up to this length share one rotation of positions, longer ones have another; None: all have the same."""
    eos_token_ids: list[int]
    generation_defaults: dict[str, float | int]


def read_json(path: Path) -> Json:
    """Read a JSON object. Raises `ConfigError` that names the file."""
    try:
        loaded: object = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist; a model folder has config.json, weights and tokenizer.json"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path} holds a {type(loaded).__name__}, not a JSON object")
    return loaded


def read_card(folder: Path, generation_config: str = "auto") -> ModelCard:
    """Read the model card of a local folder.

    ``generation_config`` is the flag: ``auto`` for the folder's own file, ``none`` for no sampling defaults, or
    another folder. Raises `ConfigError` naming the file and the missing or senseless key.
    """
    path = folder / "config.json"
    config = read_json(path)
    generation = _read_generation_config(folder, "auto")
    defaults = (
        generation if generation_config == "auto" else _read_generation_config(folder, generation_config)
    )
    num_heads = _positive(config, "num_attention_heads", path)
    return ModelCard(
        path=folder,
        architecture=_architecture(config, path),
        dtype=_dtype(config, path),
        num_layers=_positive(config, "num_hidden_layers", path),
        num_kv_heads=_positive(config, "num_key_value_heads", path, default=num_heads),
        head_dim=_positive(
            config, "head_dim", path, default=_positive(config, "hidden_size", path) // num_heads
        ),
        vocab_size=_positive(config, "vocab_size", path),
        max_model_len=_max_model_len(config, path),
        fixed_rope_len=_fixed_rope_len(config, path),
        eos_token_ids=_eos_token_ids(folder, generation, config),
        generation_defaults=_sampling_defaults(defaults),
    )


def _architecture(config: Json, path: Path) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise ConfigError(f"{path} names no `architectures`; this is needed to know how to run the model")


def _dtype(config: Json, path: Path) -> Dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name == "bfloat16":
        return "bfloat16"
    if name == "float16":
        return "float16"
    if name == "float32":
        return "float32"
    raise ConfigError(f"{path}: dtype is {name!r}; choose --dtype bfloat16, float16 or float32")


def _positive(config: Json, key: str, path: Path, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    what = "is missing" if value is None else f"is {value!r}"
    raise ConfigError(f"{path}: `{key}` {what}; it must be a positive whole number")


def _max_model_len(config: Json, path: Path) -> int:
    """Return the longest context the position encoding reaches, RoPE scaling included.

    llama3 and longrope already count their stretch into ``max_position_embeddings``; the other kinds multiply it.
    """
    key = next((key for key in _LENGTH_KEYS if config.get(key) is not None), _LENGTH_KEYS[0])
    length = _positive(config, key, path)
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict):
        return length
    kind = rope.get("rope_type") or rope.get("type") or "default"
    factor = rope.get("factor")
    if kind in _ALREADY_EXTENDED_ROPE or not isinstance(factor, int | float):
        return length
    original = rope.get("original_max_position_embeddings")
    trained = original if kind == "yarn" and isinstance(original, int) else length
    return max(length, int(trained * factor)) if kind == "yarn" else int(trained * factor)


def _fixed_rope_len(config: Json, path: Path) -> int | None:
    """Return the length beyond which RoPE scaling rotates the whole sequence anew, if the model's kind does so."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if (
        not isinstance(rope, dict)
        or (rope.get("rope_type") or rope.get("type")) not in _LENGTH_DEPENDENT_ROPE
    ):
        return None
    key = "original_max_position_embeddings"
    original = config.get(key) or rope.get(key)
    return original if isinstance(original, int) else _positive(config, "max_position_embeddings", path)


def _eos_token_ids(folder: Path, generation: Json, config: Json) -> list[int]:
    for source in (generation, config):
        ids = source.get("eos_token_id")
        if isinstance(ids, int) and not isinstance(ids, bool):
            return [ids]
        if isinstance(ids, list) and ids and all(isinstance(token_id, int) for token_id in ids):
            return list(ids)
    return _eos_of_tokenizer(folder)


def _eos_of_tokenizer(folder: Path) -> list[int]:
    """Look the tokenizer's ``eos_token`` up among its added tokens; an empty list when there is none."""
    if not (folder / "tokenizer_config.json").is_file() or not (folder / "tokenizer.json").is_file():
        return []
    named = read_json(folder / "tokenizer_config.json").get("eos_token")
    content = named.get("content") if isinstance(named, dict) else named
    added = read_json(folder / "tokenizer.json").get("added_tokens")
    if not isinstance(added, list):
        return []
    return [
        int(token["id"]) for token in added if isinstance(token, dict) and token.get("content") == content
    ][:1]


def _read_generation_config(folder: Path, where: str) -> Json:
    if where in ("none", "vllm"):
        return {}
    if where == "auto":
        path = folder / "generation_config.json"
        return read_json(path) if path.is_file() else {}
    return read_json(Path(where).expanduser() / "generation_config.json")


def _sampling_defaults(generation: Json) -> dict[str, float | int]:
    defaults: dict[str, float | int] = {}
    for theirs, ours in _SAMPLING_DEFAULTS.items():
        value = generation.get(theirs)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[ours] = value
    if generation.get("do_sample") is False and "temperature" not in defaults:
        defaults["temperature"] = 0.0
    return defaults
