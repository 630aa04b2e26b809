"""Match layers by name against a checkpoint's configuration: exact name, part of a name, or regular expression.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from quintet.executor.checkpoints.quant.formats.scheme import StoredLayer
from quintet.executor.model_config.hf_config import HfConfig
from quintet.wire.errors import ConfigError

MOST_BLOCK = 1 << 20
MAX_PATTERN = 400
"""Maximum length of a regular expression; published ones are shorter."""

_REPEATED_GROUP = re.compile(r"\)[*+{]")
"""Repeated groups can backtrack exponentially; a config is untrusted input."""


def compiled(pattern: object, path: str, key: str) -> re.Pattern[str]:
    """Return a config's compiled regular expression. Raises `ConfigError` for an invalid or unsafe pattern."""
    if isinstance(pattern, str) and len(pattern) <= MAX_PATTERN and not _REPEATED_GROUP.search(pattern):
        try:
            return re.compile(pattern)
        except re.error:
            pass
    raise ConfigError(
        f"{path}: {key} has the pattern {pattern!r:.80}; it must be a regular expression of at most {MAX_PATTERN} characters"
        " without repeated groups"
    )


def block_size(section: HfConfig, key: str) -> tuple[int, int]:
    """Return the numbers of rows and inputs that share a scale. Raises `ConfigError`."""
    value = section.values.get(key)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(each) is int and 0 < each <= MOST_BLOCK for each in value)
    ):
        raise section.wrong(key, f"two whole numbers from 1 to {MOST_BLOCK}")
    return value[0], value[1]


def word_list(section: HfConfig, *keys: str) -> tuple[str, ...]:
    """Return the names in the lists under some keys; a list may be absent or null. Raises `ConfigError`."""
    found: list[str] = []
    for key in keys:
        values = section.values.get(key)
        if values is None:
            continue
        if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
            raise section.wrong(key, "a list of names")
        found += values
    return tuple(found)


def is_part_of(layer: StoredLayer, words: Iterable[str]) -> bool:
    """Return True if a word is in the layer's name, between dots (``mlp.gate`` does not match ``mlp.gate_proj``)."""
    return any(f".{word.strip('.')}." in f".{name}." for word in words for name in layer.names)


def is_named(layer: StoredLayer, names: Iterable[str], path: str, key: str) -> bool:
    """Return True if a name equals the layer's, or is ``re:`` and a regular expression that matches its beginning."""
    for each in names:
        if each.startswith("re:"):
            pattern = compiled(each[3:], path, key)
            if any(pattern.match(name) for name in layer.names):
                return True
        elif each in layer.names:
            return True
    return False
