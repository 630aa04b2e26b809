"""Model facts read from ``config.json`` and ``generation_config.json``.

Uses the executor's parsers of ``config.json``, so that both processes see the same model. `weights` reads the weight
files, `source` locates the folder.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from quintet.deploy.config.model.checkpoint_layout import (
    MERGED_NOTE,
    correct_ties,
    has_stacked_experts,
    is_merged,
    read_entries,
    with_value,
)
from quintet.deploy.config.model.implementation import (
    check_transformers_hf_config,
    choose_implementation,
    is_known,
)
from quintet.deploy.config.model.stop_tokens import configured_ids
from quintet.executor.checkpoints.quant.formats.kv_cache import KvFormat, wish_of
from quintet.executor.checkpoints.quant.formats.registry import recognise
from quintet.executor.checkpoints.quant.formats.scheme import Format
from quintet.executor.checkpoints.weights.files import PICKLED, check_no_adapter, checkpoint_files
from quintet.executor.model_config.hf_config import HfConfig
from quintet.executor.model_config.registry import FAMILIES, architecture_of
from quintet.executor.model_config.shape import FULL, STACKED_EXPERTS
from quintet.executor.model_config.spec import DecoderSpec, KvNeed, ModelSpec
from quintet.executor.model_config.state_specs import StateNeed
from quintet.executor.model_config.unknown import unknown
from quintet.wire.config import Dtype, ModelImpl
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import Json, hf_config_path, is_gguf, parse_json, read_json, read_text
from quintet.wire.params import shown

_QUANTIZATION_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
"""Separate quantization config files, and the ``quant_method`` of those that do not contain one."""

_SAMPLING_DEFAULTS = {
    **{name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
"""Name in ``generation_config.json`` -> name in requests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Model facts from the JSON files of a model folder."""

    path: Path
    hf_config: str
    """Text of ``config.json``, with ``quantization_config`` of a separate file merged in."""
    stored: Format | None
    """Quantization format of the checkpoint; None if it is not quantized."""
    stored_kv_format: KvFormat | None
    """KV data type that the checkpoint requests; None without a request, or with transformers' layers."""
    architecture: str
    implementation: ModelImpl
    dtype: Dtype
    spec: ModelSpec
    """Shapes of the whole model."""
    kv_needs: tuple[KvNeed | None, ...]
    """KV of each layer per token; of one rank after `quintet.deploy.config.ranks.of_one_rank`."""
    state_needs: tuple[StateNeed | None, ...]
    """Recurrent state of each layer per request, of one rank too; empty if no layer has one."""
    eos_token_ids: list[int]
    """End-of-sequence ids of the JSON files; `quintet.deploy.config.model.stop_tokens` adds those of the tokenizer."""
    generation_defaults: dict[str, float | int]
    stages: tuple[tuple[int, int], ...] = ()
    """Layer ranges of pipeline stages (`quintet.executor.model_config.share.stage_layers`); empty without stages."""
    notes: tuple[str, ...] = ()
    """Deviations from ``config.json``: one line each, for the startup log."""

    @property
    def decoder(self) -> DecoderSpec | None:
        """The spec of Quintet's layers; None if only transformers or another package has the architecture."""
        return self.spec if isinstance(self.spec, DecoderSpec) else None

    @property
    def embedding_width(self) -> int:
        """Width of a token embedding; 0 if only the executor knows it."""
        return 0 if self.decoder is None else self.decoder.embedding_width or self.decoder.hidden_size


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values that override those of a model's files."""

    hf_config: Json = field(default_factory=dict)
    """Overrides of ``config.json``, merged recursively."""
    generation: Json = field(default_factory=dict)
    """Overrides of sampling defaults, and further end-of-sequence ids."""


def read_facts(
    folder: Path,
    generation_config: str = "auto",
    model_impl: str = "auto",
    overrides: Overrides | None = None,
    *,
    with_weights: bool = False,
) -> ModelFacts:
    """Read model facts from a folder's JSON files, or from a GGUF file.

    ``generation_config`` and ``model_impl`` are the flags. with_weights: whether weight headers override ``config.json`` on
    tied embeddings, and give a data type that it lacks. Raises `ConfigError` with the file and the missing or invalid key.
    """
    path, overrides = hf_config_path(folder), overrides or Overrides()
    config, text = _read_hf_config(folder, overrides.hf_config)
    generation = _read_generation_config(folder, "auto")
    defaults = (
        generation if generation_config == "auto" else _read_generation_config(folder, generation_config)
    )
    architecture = _architecture(config, path)
    hf_config = HfConfig(config, str(path))
    implementation = choose_implementation(model_impl, architecture)
    family = FAMILIES.get(architecture) if implementation == "quintet" else None
    if implementation == "transformers" and is_gguf(folder):
        raise ConfigError(f"{folder}: --model-impl transformers does not support GGUF files; drop it")
    if implementation == "transformers":
        check_transformers_hf_config(hf_config, architecture)
    stored = recognise(hf_config)
    spec: ModelSpec = unknown(hf_config) if family is None else family.read(hf_config)
    notes = _check_generation_overrides(overrides.generation)
    if family is not None and with_weights:
        config, more_notes = _as_stored(folder, config, spec, stored)
        if config != hf_config.values:
            text, hf_config = json.dumps(config), HfConfig(config, str(path))
            spec, stored = family.read(hf_config), recognise(hf_config)
        notes += more_notes
    return ModelFacts(
        path=folder,
        hf_config=text,
        stored=stored,
        stored_kv_format=wish_of(hf_config) if implementation == "quintet" else None,
        architecture=architecture,
        implementation=implementation,
        dtype=_dtype(config, path) or (_stored_dtype(folder) if with_weights else "float32"),
        spec=spec,
        kv_needs=spec.kv_needs,
        state_needs=spec.state_needs,
        eos_token_ids=configured_ids(
            overrides.generation, defaults, generation, config, config.get("text_config")
        ),
        generation_defaults=_sampling_defaults(defaults | overrides.generation),
        notes=tuple(notes),
    )


def _as_stored(folder: Path, config: Json, spec: ModelSpec, stored: Format | None) -> tuple[Json, list[str]]:
    """Return a config with the ties, layout of experts and format that the checkpoint has, and notes on changes."""
    notes = []
    corrected = correct_ties(folder, config, spec)
    if corrected is not None:
        config, note = corrected
        notes.append(note)
    if has_stacked_experts(folder, spec):
        config = with_value(config, STACKED_EXPERTS, True)
    if is_merged(folder, stored):
        config = with_value(config, "quantization_config", None)
        notes.append(MERGED_NOTE)
    return config, notes


def _read_hf_config(folder: Path, changes: Json) -> tuple[Json, str]:
    """Return ``config.json`` as values and as text, with quantization files and overrides merged in."""
    path = hf_config_path(folder)
    if not path.exists():
        _check_kind(folder)
    text = _hf_config_of_gguf(path) if is_gguf(folder) else with_quantization(folder, read_text(path))
    stored = parse_json(text, path)
    config = overridden(with_one_rope(stored), changes)
    if config != stored:
        text = json.dumps(config)
    architectures = [_architecture(config, path)]
    if config.get("architectures") != architectures:
        config = config | {"architectures": architectures}
        text = json.dumps(config)
    return config, text


_ROPES = ("rope_parameters", "rope_scaling")
"""Keys of RoPE settings: of transformers 5, and of older versions."""


def with_one_rope(config: Json) -> Json:
    """Return a config with ``rope_scaling`` merged into ``rope_parameters``, of the language model too if it is a part.

    Some have both, because ``rope_scaling`` was added by hand to extend the context. It wins, as in transformers.
    """
    part = config.get("text_config")
    return _with_one_rope(
        config | {"text_config": _with_one_rope(part)} if isinstance(part, dict) else config
    )


def _with_one_rope(config: Json) -> Json:
    if not all(isinstance(config.get(key), dict) and config[key] for key in _ROPES):
        return config
    return overridden(config | {"rope_scaling": None}, {"rope_scaling": config["rope_scaling"]})


def overridden(config: Json, changes: Json) -> Json:
    """Return a config with overrides merged in. Older RoPE keys override ``rope_parameters`` if present."""
    changed = dict(config)
    for key, value in changes.items():
        current, rope = changed.get(key), changed.get("rope_parameters")
        if key == "rope_scaling" and isinstance(rope, dict) and isinstance(value, dict):
            changed["rope_parameters"] = _with_rope_settings(rope, value)
        elif key == "rope_theta" and isinstance(rope, dict):
            changed["rope_parameters"] = _with_rope_settings(rope, {key: value})
        elif isinstance(current, dict) and isinstance(value, dict):
            merge = _with_rope_settings if key in _ROPES else overridden
            changed[key] = merge(current, value)
        else:
            changed[key] = value
    return changed


def _with_rope_settings(rope: Json, settings: Json) -> Json:
    """Return RoPE settings with others merged in: into those of full attention if there are some for each layer type."""
    full = rope.get(FULL)
    if isinstance(full, dict) and not any(isinstance(each, dict) for each in settings.values()):
        return rope | {FULL: _with_rope_settings(full, settings)}
    kind = {"rope_type": settings["type"]} if "type" in settings else {}
    return overridden(rope, kind | settings)


def _check_kind(folder: Path) -> None:
    """Raise `ConfigError` for a folder without ``config.json`` that holds GGUF files, an adapter or Mistral's format."""
    files = [path for path in sorted(folder.glob("*.gguf")) if not path.name.startswith("mmproj")]
    if files:
        raise ConfigError(f"{folder} has no config.json, but GGUF files: give one, for example {files[0]}")
    check_no_adapter(folder)
    if (folder / "params.json").exists():
        raise ConfigError(
            f"{folder} has a model in Mistral's own format (params.json): use the files with config.json, which transformers"
            " reads"
        )


def with_quantization(folder: Path, text: str) -> str:
    """Return the text of ``config.json`` with the ``quantization_config`` of another key or file, as older tools wrote it."""
    config = parse_json(text, folder / "config.json")
    if config.get("quantization_config"):
        return text
    section = config.get("compression_config") or _quantization_of_file(folder)
    return json.dumps(config | {"quantization_config": section}) if section else text


def _quantization_of_file(folder: Path) -> Json | None:
    for name, method in _QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            section = read_json(folder / name)
            return {"quant_method": "squeezellm" if "wbits" in section else method} | section
    return None


_MAX_NAME_CHARS = 100
"""Limit of an architecture's name, which error messages repeat."""


def _architecture(config: Json, path: Path) -> str:
    """Return the architecture: the first known one of ``architectures``, else that of ``model_type``, else the first one."""
    names, kind = config.get("architectures"), config.get("model_type")
    listed = names if isinstance(names, list) else []
    name = next((each for each in listed if isinstance(each, str) and is_known(each)), None)
    if name is None and isinstance(kind, str):
        derived = architecture_of(kind, is_part="text_config" in config)
        name = derived if not listed or _is_wrapper(listed[0], derived) else None
    name = listed[0] if name is None and listed else name
    if isinstance(name, str) and name.isprintable() and 0 < len(name) <= _MAX_NAME_CHARS:
        return name
    raise ConfigError(f"{path} has neither `architectures` nor `model_type`; add one of them")


def _is_wrapper(name: object, architecture: str) -> bool:
    """Return whether a class is a known architecture in a training wrapper, as ``FSDPLlamaForCausalLM``, without its output
    layer, as ``MistralModel``, or in other letter case, as ``ExaoneMoEForCausalLM``."""
    base = f"{architecture.removesuffix('ForCausalLM')}Model"
    is_like = isinstance(name, str) and (name.lower().endswith(architecture.lower()) or name == base)
    return is_like and is_known(architecture)


_DTYPE_NAMES: dict[Dtype, tuple[str, ...]] = {
    "bfloat16": ("bfloat16", "bf16"),
    "float16": ("float16", "half", "fp16"),
    "float32": ("float32", "float", "fp32", "float64", "double"),
}
"""Data type -> names of a checkpoint's data type that is loaded as it."""
_STORED_DTYPES: dict[str, Dtype] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Names in headers of safetensors."""
_QUANTIZED_DTYPES = ("float8", "int8", "uint8", "float4", "int4")
"""Prefixes of names that are data types of quantized weights, not of activations."""


def _dtype(config: Json, path: Path) -> Dtype | None:
    """Return the data type of activations: of the language model if the whole model's config has none. None: of neither."""
    part = config.get("text_config")
    for each in (config, part if isinstance(part, dict) else {}):
        name = str(each.get("dtype") or each.get("torch_dtype") or "auto").removeprefix("torch.")
        for dtype, names in _DTYPE_NAMES.items():
            if name in names:
                return dtype
        if name.startswith(_QUANTIZED_DTYPES):
            return "bfloat16"
        if name != "auto":
            raise ConfigError(
                f"{path}: dtype is {shown(name)}; set another one, for example with --hf-overrides "
                '\'{"dtype": "bfloat16"}\''
            )
    return None


def _stored_dtype(folder: Path) -> Dtype:
    """Return the data type of most values in the safetensors files; float32 without one."""
    counts: Counter[Dtype] = Counter({"float32": 0})
    for path in [] if is_gguf(folder) else checkpoint_files(folder):
        for entry in () if path.suffix in PICKLED else read_entries(path).values():
            if entry.dtype in _STORED_DTYPES:
                counts[_STORED_DTYPES[entry.dtype]] += math.prod(entry.shape)
    return counts.most_common(1)[0][0]


def _hf_config_of_gguf(path: Path) -> str:
    # Imported only for GGUF files: numpy starts threads, after which the supervisor must not fork.
    from quintet.executor.checkpoints.gguf.hf_config import hf_config_of_gguf
    from quintet.executor.checkpoints.gguf.parts import read_parts

    return hf_config_of_gguf(read_parts(path))


def _read_generation_config(folder: Path, where: str) -> Json:
    if where in ("none", "vllm"):
        return {}
    if where == "auto" and is_gguf(folder):
        from quintet.deploy.config.gguf.tokenizer import generation_of_gguf
        from quintet.executor.checkpoints.gguf.parts import read_parts

        return generation_of_gguf(read_parts(folder))
    if where == "auto":
        path = folder / "generation_config.json"
        return read_json(path) if path.is_file() else {}
    path = Path(where).expanduser() / "generation_config.json"
    if not path.is_file():
        raise ConfigError(
            f"--generation-config {where!r}: {path} does not exist; give auto, none, or a folder with this file"
        )
    return read_json(path)


def _check_generation_overrides(generation: Json) -> list[str]:
    """Return notes on ``--override-generation-config``. Raises `ConfigError` for a sampling default that is not a number."""
    for name, value in generation.items():
        if name in _SAMPLING_DEFAULTS and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise ConfigError(f"--override-generation-config: {name} is {value!r}; it must be a number")
    unknown = sorted(generation.keys() - _SAMPLING_DEFAULTS.keys() - {"do_sample", "eos_token_id"})
    known = ", ".join(_SAMPLING_DEFAULTS)
    return (
        [f"--override-generation-config: {', '.join(unknown)} ignored; sampling defaults are {known}"]
        if unknown
        else []
    )


def _sampling_defaults(generation: Json) -> dict[str, float | int]:
    defaults: dict[str, float | int] = {}
    for theirs, ours in _SAMPLING_DEFAULTS.items():
        value = generation.get(theirs)
        if isinstance(value, int | float) and not isinstance(value, bool):
            defaults[ours] = value
    if generation.get("do_sample") is False and "temperature" not in defaults:
        defaults["temperature"] = 0.0
    return defaults
