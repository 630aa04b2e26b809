"""Translation of vLLM's settings to Quintet's: of command lines, YAML files and keyword arguments."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping

from quintet.deploy.config.flag import boolean, json_object, option
from quintet.deploy.config.vllm_flags import (
    ACCEPTED_SWITCHES,
    ACCEPTED_VALUES,
    DRAFTS,
    HUB,
    KERNELS,
    REFUSED_SWITCHES,
    REFUSED_VALUES,
    RENAMED,
    ROPE,
)
from quintet.wire.errors import ConfigError

Settings = dict[str, object]

LOCAL_ENGINES = "data_parallel_size_local"
"""Refused, except if all engines are local."""

_HARMLESS = {"", "0", "0.0", "1", "1.0", "none", "auto", "false", "[]", "{}", "generate", "raw_logprobs"}
"""Values equal to the fixed behaviour."""


def translated(settings: Mapping[str, object], source: str) -> tuple[Settings, list[str]]:
    """Translate settings to Quintet's keys; also return a line for each setting without effect.

    Raises `ConfigError` for refused ones.
    """
    found: Settings = {}
    notes: list[str] = []
    all_given = {key: value for _, key, value in _given(settings)}

    def merge(into: str, part: Settings) -> None:
        found[into] = json_object(found.get(into, all_given.get(into, {})), option(into)) | part

    for name, key, value in _given(settings):
        accepted = ACCEPTED_SWITCHES.get(key) or ACCEPTED_VALUES.get(key)
        refused = REFUSED_SWITCHES.get(key) or REFUSED_VALUES.get(key)
        if key in RENAMED:
            new = RENAMED[key]
            found[new.ours] = value if new.convert is None else new.convert(boolean(value))
        elif key in ROPE:
            merge(
                "hf_overrides",
                {key: json_object(value, option(key)) if key == "rope_scaling" else _number(value, key)},
            )
        elif key in DRAFTS:
            merge(
                "speculative_config",
                {DRAFTS[key]: int(_number(value, key)) if key == "spec_tokens" else value},
            )
        elif key in HUB:
            _set_environment(HUB[key], value)
        elif key == "attention_backend" and isinstance(value, str) and value.isupper():
            notes.append(f"{option(key)} {value} has no effect: {KERNELS}")
        elif key == LOCAL_ENGINES and str(value) == str(all_given.get("data_parallel_size", 1)):
            continue
        elif accepted is not None:
            notes.append(f"{option(key)} has no effect: {accepted}")
        elif refused is None:
            if key not in found:
                found[name] = value
        elif not _is_default(value):
            raise ConfigError(f"{source}: vLLM flag {option(key)} is not supported: {refused}")
    return found, notes


def _given(settings: Mapping[str, object]) -> Iterator[tuple[str, str, object]]:
    """Yield name, key and value of each setting, without those that are None, also as a word: they keep their defaults.

    The model and keys of authentication may have that word. A switch may be turned off by ``no-`` before its name.
    """
    for raw_name, value in settings.items():
        name = str(raw_name)
        key = name.replace("-", "_")
        if key.startswith("no_") and isinstance(is_off := boolean(value), bool):
            yield key[3:], key[3:], not is_off
        elif value is not None and (value != "None" or key.endswith(("model", "_key"))):
            yield name, key, value


def _set_environment(name: str, value: object) -> None:
    """Set an environment variable; a bare ``--hf-token`` (true) keeps the stored credentials."""
    if isinstance(value, str) and value:
        os.environ[name] = os.path.expanduser(value) if name == HUB["download_dir"] else value


def _is_default(value: object) -> bool:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text.strip().lower() in _HARMLESS


def _number(value: object, key: str) -> float:
    try:
        return float(str(value))
    except ValueError:
        raise ConfigError(f"{option(key)} is {value!r}; it must be a number") from None
