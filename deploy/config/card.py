"""The few numbers of a model folder's JSON files that serving needs.

Reads ``config.json`` with the functions that the executor builds the model with, so that both know one model. Knows not the
weights (see `weights`) nor where the folder comes from (see `source`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from quintet.deploy.config.endings import configured_ids
from quintet.deploy.config.implementation import check_transformers_card, choose_implementation
from quintet.deploy.config.own_head import has_own_head, untied
from quintet.executor.checkpoints.quant.formats.kv_cache import KvFormat, wish_of
from quintet.executor.checkpoints.quant.formats.registry import recognise
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.model_config.card import ModelCard
from quintet.executor.model_config.experts import ExpertsSpec
from quintet.executor.model_config.families.unknown import unknown
from quintet.executor.model_config.registry import FAMILIES, architecture_of
from quintet.executor.model_config.spec import DecoderSpec, KvNeed, ModelSpec
from quintet.executor.model_config.state_specs import StateNeed
from quintet.wire.config import Dtype, ModelImpl
from quintet.wire.errors import ConfigError
from quintet.wire.json_files import Json, parse_json, read_json, read_text
from quintet.wire.model_files import card_path, is_gguf
from quintet.wire.params import shown

_QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Beside ``config.json``: what says how weights are quantized, and by which method where it does not say."""

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
    card: str
    """Text of its ``config.json``, with what another file says of how the weights are quantized."""
    stored: Format | None
    """How they are; None where they are not."""
    kv_wish: KvFormat | None
    """What the checkpoint asks of keys and values; None where it says nothing, or where they are not ours."""
    architecture: str
    implementation: ModelImpl
    dtype: Dtype
    kv_needs: tuple[KvNeed | None, ...]
    """What each layer keeps of every token."""
    state_needs: tuple[StateNeed | None, ...]
    """What each layer keeps of every request besides; empty where no layer does."""
    vocab_size: int
    embedding_width: int
    """Numbers of a token's embedding; 0 where only the executor knows."""
    num_parameters: int | None
    """Numbers of all its matrices; None where only the executor knows."""
    expert_depths: frozenset[int]
    """How many numbers a row has that one of its experts' matrices is multiplied with."""
    max_model_len: int
    """The longest context the position encoding reaches, RoPE scaling included."""
    fixed_rope_len: int | None
    """See `quintet.executor.model_config.rope.RopeSpec.fixed_len`."""
    eos_token_ids: list[int]
    """That the configurations name; see `quintet.deploy.config.endings` for the others."""
    generation_defaults: dict[str, float | int]
    stages: tuple[tuple[int, int], ...] = ()
    """Which layers each stage has (`quintet.executor.model_config.share.stage_layers`); empty where they are not cut."""
    notes: tuple[str, ...] = ()
    """What was taken otherwise than the card says it: one line each, for the boot story."""


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values that go before those of a model's files."""

    card: Json = field(default_factory=dict)
    """Of ``config.json``, also within objects."""
    generation: Json = field(default_factory=dict)
    """Of sampling defaults."""


def read_facts(
    folder: Path,
    generation_config: str = "auto",
    model_impl: str = "auto",
    overrides: Overrides | None = None,
    *,
    with_weights: bool = False,
) -> ModelFacts:
    """Read what serving needs of a local folder's JSON files, or of a GGUF file.

    ``generation_config`` is the flag: ``auto`` for the folder's own file, ``none`` for no sampling defaults, or
    another folder; so is ``model_impl``. with_weights: whether what the folder's weights hold goes before what the card says of
    them. Raises `ConfigError` naming the file and the missing or senseless key.
    """
    path, overrides = card_path(folder), overrides or Overrides()
    config, text = _read_card(folder, overrides.card)
    generation = _read_generation_config(folder, "auto")
    defaults = (
        generation if generation_config == "auto" else _read_generation_config(folder, generation_config)
    )
    architecture = _architecture(config, path)
    card = ModelCard(config, str(path))
    implementation = choose_implementation(model_impl, architecture)
    family = FAMILIES.get(architecture) if implementation == "quintet" else None
    if implementation == "transformers" and is_gguf(folder):
        raise ConfigError(f"{folder}: transformers does not compute files of GGUF here: drop --model-impl")
    if implementation == "transformers":
        check_transformers_card(card, architecture)
    stored = recognise(card)
    spec: ModelSpec = unknown(card) if family is None else family.read(card)
    notes = []
    if family is not None and with_weights and _brings_head(folder, spec):
        config, text = _changed(untied(config))
        card = ModelCard(config, str(path))
        spec = family.read(card)
        notes.append(_OWN_HEAD)
    return ModelFacts(
        path=folder,
        card=text,
        stored=stored,
        kv_wish=wish_of(card) if implementation == "quintet" else None,
        architecture=architecture,
        implementation=implementation,
        dtype=_dtype(config, path),
        kv_needs=spec.kv_needs,
        state_needs=spec.state_needs,
        vocab_size=spec.vocab_size,
        embedding_width=spec.embedding_width or spec.hidden_size if isinstance(spec, DecoderSpec) else 0,
        num_parameters=spec.num_parameters,
        expert_depths=_expert_depths(spec),
        max_model_len=spec.reach,
        fixed_rope_len=spec.fixed_rope_len,
        eos_token_ids=configured_ids(generation, config),
        generation_defaults=_sampling_defaults(defaults | overrides.generation),
        notes=tuple(notes),
    )


def _read_card(folder: Path, changes: Json) -> tuple[Json, str]:
    """Return a model's card, as values and as text, with what other files and the command line say of it."""
    path = card_path(folder)
    text = _card_of_gguf(path) if is_gguf(folder) else with_quantization(folder, read_text(path))
    config = parse_json(text, path)
    if changes:
        config, text = _changed(_overridden(config, changes))
    if not config.get("architectures"):
        config, text = _changed(config | {"architectures": [_architecture(config, path)]})
    return config, text


def with_quantization(folder: Path, text: str) -> str:
    """Return the text of a ``config.json`` with its ``quantization_config``, which older tools wrote into a file of its own."""
    path = folder / "config.json"
    for name, method in _QUANTIZATION_FILES.items():
        if not (folder / name).is_file():
            continue
        config = parse_json(text, path)
        if "quantization_config" in config:
            return text
        section = read_json(folder / name)
        usual = {"quant_method": "squeezellm" if "wbits" in section else method}
        return json.dumps(config | {"quantization_config": usual | section})
    return text


def _expert_depths(spec: ModelSpec) -> frozenset[int]:
    if not isinstance(spec, DecoderSpec):
        return frozenset()
    widths = {layer.mlp.width for layer in spec.layers if isinstance(layer.mlp, ExpertsSpec)}
    return frozenset(widths | {spec.hidden_size} if widths else ())


_OWN_HEAD = "config.json says that the output layer is the embedding, but the checkpoint has another one (lm_head): that is used"
_MOST_CHARS = 100
"""Of an architecture's name, which errors repeat."""


def _architecture(config: Json, path: Path) -> str:
    """Return the name of the architecture; where the card has none, the one that its ``model_type`` says."""
    names, kind = config.get("architectures"), config.get("model_type")
    name = names[0] if isinstance(names, list) and names else None
    if name is None and isinstance(kind, str):
        name = architecture_of(kind, is_part="text_config" in config)
    if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MOST_CHARS:
        return name
    raise ConfigError(
        f"{path} names neither `architectures` nor `model_type`; one of them is needed to know how to run the model"
    )


def _brings_head(folder: Path, spec: ModelSpec) -> bool:
    return isinstance(spec, DecoderSpec) and spec.tied and has_own_head(folder, spec.names)


def _overridden(config: Json, changes: Json) -> Json:
    """Return a card with other values. The older keys of rotations change ``rope_parameters`` where a card has these."""
    changed = dict(config)
    for key, value in changes.items():
        held, rope = changed.get(key), changed.get("rope_parameters")
        if key == "rope_scaling" and isinstance(rope, dict) and isinstance(value, dict):
            changed["rope_parameters"] = {**rope, **value}
        elif key == "rope_theta" and isinstance(rope, dict):
            changed["rope_parameters"] = {**rope, key: value}
        elif isinstance(held, dict) and isinstance(value, dict):
            changed[key] = _overridden(held, value)
        else:
            changed[key] = value
    return changed


def _changed(config: Json) -> tuple[Json, str]:
    """Return a card and its text."""
    return config, json.dumps(config)


def _dtype(config: Json, path: Path) -> Dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name == "bfloat16":
        return "bfloat16"
    if name == "float16":
        return "float16"
    if name == "float32":
        return "float32"
    raise ConfigError(f"{path}: dtype is {shown(name)}; choose --dtype bfloat16, float16 or float32")


def _card_of_gguf(path: Path) -> str:
    # Only of a file: what reads it imports numpy, whose threads would keep the supervisor from forking its processes.
    from quintet.executor.checkpoints.gguf.card import card_of_gguf
    from quintet.executor.checkpoints.gguf.parts import read_parts

    return card_of_gguf(read_parts(path))


def _read_generation_config(folder: Path, where: str) -> Json:
    if where in ("none", "vllm"):
        return {}
    if where == "auto" and is_gguf(folder):
        from quintet.deploy.config.gguf.endings import generation_of_gguf
        from quintet.executor.checkpoints.gguf.parts import read_parts

        return generation_of_gguf(read_parts(folder))
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
