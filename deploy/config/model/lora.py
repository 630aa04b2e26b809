"""LoRA adapters of the served model: ``--lora-modules``, and the files of PEFT."""

from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.checkpoint_layout import read_entries
from quintet.deploy.config.model.hf_config import ModelFacts
from quintet.deploy.config.model.source import fetch_adapter
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdapterConfig,
    Json,
    adapter_digest_of,
    read_json,
)
from quintet.wire.params import shown

FLAG = "--lora-modules"
_JSON_KEYS = {"name", "path", "base_model_name"}
_CHANGED_BASES = ("pissa", "olora", "loftq", "corda", "lora_ga")
"""``init_lora_weights`` of adapters that need changed weights of the model."""
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "kasa_config": (None,),
    "arrow_config": (None,),
    "monteclora_config": (None,),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
}
"""Key of ``adapter_config.json`` -> supported values."""


def adapters_config(options: Options, facts: ModelFacts, device: str) -> list[AdapterConfig]:
    """Return the adapters. Raises `ConfigError`."""
    if not options.lora_modules:
        return []
    _check_support(options, facts, device)
    adapters: list[AdapterConfig] = []
    taken = {*(options.served_model_name or [options.model or ""])}
    for given in options.lora_modules:
        name, path = _name_and_path(given)
        if name in taken:
            raise ConfigError(
                f"{FLAG} {given!r:.200}: the name {name!r} is already that of a model or adapter"
            )
        taken.add(name)
        adapters.append(_read(name, path))
    return adapters


def file_bytes(adapter: AdapterConfig) -> int:
    """Return the size of the file of an adapter's weights."""
    return (Path(adapter.path) / ADAPTER_WEIGHTS).stat().st_size


def memory_bytes(adapters: list[AdapterConfig], item_bytes: int) -> int:
    """Return the memory of the adapters on a tensor-parallel rank: each matrix has the largest size of all adapters.

    Raises `ConfigError`.
    """
    largest: dict[str, int] = {}
    for each in adapters:
        for name, entry in read_entries(Path(each.path) / ADAPTER_WEIGHTS).items():
            largest[name] = max(largest.get(name, 0), math.prod(entry.shape))
    return len(adapters) * item_bytes * sum(largest.values())


def _check_support(options: Options, facts: ModelFacts, device: str) -> None:
    if options.nnodes > 1:
        raise ConfigError(f"{FLAG} is not supported with --nnodes {options.nnodes}: drop one of them")
    if facts.implementation == "transformers":
        raise ConfigError(
            f"{FLAG}: {facts.architecture} runs in transformers, which is not supported: merge the adapter"
        )
    if device == "cuda":
        raise ConfigError(f"{FLAG} is not supported on GPUs yet: use --device cpu, or merge the adapter")


def _name_and_path(given: str) -> tuple[str, str]:
    """Return name and path of ``NAME=PATH``, or of vLLM's JSON object."""
    name, _, path = given.partition("=")
    if given.lstrip().startswith("{"):
        try:
            values = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{FLAG} is {given!r:.200}, which is not JSON: {error}") from None
        unknown = sorted(set(values) - _JSON_KEYS)
        if unknown:
            raise ConfigError(
                f"{FLAG}: the key {shown(unknown[0])} is not supported; allowed are {', '.join(sorted(_JSON_KEYS))}"
            )
        name, path = str(values.get("name", "")), str(values.get("path", ""))
    if not name or not path:
        raise ConfigError(f'{FLAG} is {given!r:.200}; give NAME=PATH or {{"name": "NAME", "path": "PATH"}}')
    return name, path


def _read(name: str, path: str) -> AdapterConfig:
    """Check an adapter's configuration, and return the adapter."""
    folder = fetch_adapter(path, FLAG)
    for file in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / file).is_file():
            is_pickled = (folder / "adapter_model.bin").is_file()
            advice = "; save it again with PEFT, which writes safetensors" if is_pickled else ""
            raise ConfigError(
                f"{FLAG} {name}={path}: {folder / file} does not exist; an adapter in the format of PEFT has {ADAPTER_CONFIG} and"
                f" {ADAPTER_WEIGHTS}{advice}"
            )
    _check_config(folder / ADAPTER_CONFIG, read_json(folder / ADAPTER_CONFIG))
    return AdapterConfig(name=name, path=str(folder), digest=adapter_digest_of(folder))


def _check_config(path: Path, values: Json) -> None:
    """Raise `ConfigError` for values that are not supported."""
    if values.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type is {shown(values.get('peft_type'))}; only LORA is supported")
    for key, supported in _UNSUPPORTED.items():
        if values.get(key) not in supported:
            raise ConfigError(
                f"{path}: {key} is {shown(values[key])}, which is not supported: merge the adapter into the model"
            )
    start = values.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASES):
        raise ConfigError(
            f"{path}: init_lora_weights is {shown(start)}: the adapter changes the model's own weights too; convert it with PEFT"
            " to a plain LoRA adapter, or merge it"
        )
    patterns = values.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        raise ConfigError(f"{path}: alpha_pattern is {shown(patterns)}; it must be an object")
    for key, alpha in {"lora_alpha": values.get("lora_alpha", 8), **patterns}.items():
        is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
        if not is_number or not abs(alpha) <= sys.float_info.max:
            raise ConfigError(f"{path}: the alpha {shown(key)} is {shown(alpha)}; it must be a number")
        try:
            re.compile(key)
        except re.error as error:
            raise ConfigError(
                f"{path}: alpha_pattern {shown(key)} is not a regular expression: {error}"
            ) from None
