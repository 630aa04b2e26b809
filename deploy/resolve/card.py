"""The few numbers of a model folder's JSON files that serving needs.

Reads ``config.json`` with the functions that the executor builds the model with, so that both know one model. Knows not the
weights (see `weights`) nor where the folder comes from (see `source`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from quintet.executor.cards.card import ModelCard
from quintet.executor.cards.families import (
    FAMILIES,
    MAX_HEAD_DIM,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_VOCAB,
    MAX_WIDTH,
)
from quintet.executor.cards.rope import MAX_POSITIONS, RopeSpec, rope_spec
from quintet.executor.cards.spec import DecoderSpec
from quintet.wire.errors import ConfigError
from quintet.wire.json_files import Json, read_json
from quintet.wire.params import shown

Dtype = Literal["bfloat16", "float16", "float32"]

_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len")
_SAMPLING_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's folder says about it."""

    path: Path
    architecture: str
    dtype: Dtype
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_parameters: int | None
    """Numbers of all its matrices; None where only the executor knows."""
    max_model_len: int
    """The longest context the position encoding reaches, RoPE scaling included."""
    fixed_rope_len: int | None
    """See `quintet.executor.cards.rope.RopeSpec.fixed_len`."""
    eos_token_ids: list[int]
    generation_defaults: dict[str, float | int]


def read_facts(folder: Path, generation_config: str = "auto") -> ModelFacts:
    """Read what serving needs of a local folder's JSON files.

    ``generation_config`` is the flag: ``auto`` for the folder's own file, ``none`` for no sampling defaults, or
    another folder. Raises `ConfigError` naming the file and the missing or senseless key.
    """
    path = folder / "config.json"
    config = read_json(path)
    generation = _read_generation_config(folder, "auto")
    defaults = (
        generation if generation_config == "auto" else _read_generation_config(folder, generation_config)
    )
    card = ModelCard(config, str(path))
    architecture = _architecture(config, path)
    family = FAMILIES.get(architecture)
    shape = _shape_of_stranger(card) if family is None else _shape_of(family(card))
    return ModelFacts(
        path=folder,
        architecture=architecture,
        dtype=_dtype(config, path),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        num_parameters=shape.num_parameters,
        max_model_len=shape.rope.reach,
        fixed_rope_len=shape.rope.fixed_len,
        eos_token_ids=_eos_token_ids(folder, generation, config),
        generation_defaults=_sampling_defaults(defaults),
    )


@dataclass(frozen=True, slots=True)
class _Shape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rope: RopeSpec
    num_parameters: int | None


def _shape_of(spec: DecoderSpec) -> _Shape:
    return _Shape(
        spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.vocab_size, spec.rope, spec.num_parameters
    )


def _shape_of_stranger(card: ModelCard) -> _Shape:
    """Return the shape of a model that another package brings, in the usual spellings."""
    heads = card.whole("num_attention_heads", 1, MAX_HEADS)
    head_dim = card.whole("head_dim", 1, MAX_HEAD_DIM, card.whole("hidden_size", 1, MAX_WIDTH) // heads)
    key = next((key for key in _LENGTH_KEYS if card.has(key)), _LENGTH_KEYS[0])
    return _Shape(
        num_layers=card.whole("num_hidden_layers", 1, MAX_LAYERS),
        num_kv_heads=card.whole("num_key_value_heads", 1, MAX_HEADS, heads),
        head_dim=head_dim,
        vocab_size=card.whole("vocab_size", 1, MAX_VOCAB),
        rope=_rope_of_stranger(card, head_dim, card.whole(key, 1, MAX_POSITIONS)),
        num_parameters=None,
    )


def _rope_of_stranger(card: ModelCard, head_dim: int, max_positions: int) -> RopeSpec:
    """Return the card's rotation; one that stretches nothing where only the model's own package may know it."""
    try:
        return rope_spec(card, head_dim, max_positions)
    except ConfigError:
        return RopeSpec(
            kind="default",
            theta=1e4,
            rotary_dim=head_dim,
            max_positions=max_positions,
            original_positions=max_positions,
        )


def _architecture(config: Json, path: Path) -> str:
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str) and names[0].isprintable():
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
    raise ConfigError(f"{path}: dtype is {shown(name)}; choose --dtype bfloat16, float16 or float32")


def _eos_token_ids(folder: Path, generation: Json, config: Json) -> list[int]:
    for source in (generation, config):
        ids = source.get("eos_token_id")
        if type(ids) is int:
            return [ids]
        if isinstance(ids, list) and ids and all(type(token_id) is int for token_id in ids):
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
    ids = [token.get("id") for token in added if isinstance(token, dict) and token.get("content") == content]
    return [token_id for token_id in ids if type(token_id) is int][:1]


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
