"""Which layers a checkpoint's configuration names: exactly, by a part of the name, or by a regular expression.

Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from quintet.executor.checkpoints.quant.formats.scheme import StoredLayer
from quintet.executor.model_config.card import ModelCard
from quintet.wire.errors import ConfigError

MOST_BLOCK = 1 << 20
MAX_PATTERN = 400
"""Characters of a regular expression; more than any publisher's."""

_REPEATED_GROUP = re.compile(r"\)[*+{]")
"""What can make a match take forever: a card is another's file."""


def compiled(pattern: object, path: str, key: str) -> re.Pattern[str]:
    """Return a card's regular expression. Raises `ConfigError` for what is none, or may not end."""
    if isinstance(pattern, str) and len(pattern) <= MAX_PATTERN and not _REPEATED_GROUP.search(pattern):
        try:
            return re.compile(pattern)
        except re.error:
            pass
    raise ConfigError(
        f"{path}: {key} has the pattern {pattern!r:.80}; it must be a regular expression of at most {MAX_PATTERN} characters that"
        " repeats no group"
    )


def block_size(section: ModelCard, key: str) -> tuple[int, int]:
    """Return how many rows and inputs share a scale. Raises `ConfigError`."""
    value = section.values.get(key)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(each) is int and 0 < each <= MOST_BLOCK for each in value)
    ):
        raise section.wrong(key, f"two whole numbers from 1 to {MOST_BLOCK}")
    return value[0], value[1]


def word_list(values: object, path: str, key: str) -> tuple[str, ...]:
    """Return a card's list of names; an empty one for null. Raises `ConfigError`."""
    if values is None:
        return ()
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise ConfigError(f"{path}: {key} is {values!r:.60}; it must be a list of names")
    return tuple(values)


def is_part_of(layer: StoredLayer, words: Iterable[str]) -> bool:
    """Whether one of the words is in the layer's name, between dots (``mlp.gate`` is not in ``mlp.gate_proj``)."""
    return any(f".{word.strip('.')}." in f".{name}." for word in words for name in layer.names)


def is_named(layer: StoredLayer, names: Iterable[str], path: str, key: str) -> bool:
    """Whether one of the names is the layer's, or, after ``re:``, a regular expression that its name begins with."""
    for each in names:
        if each.startswith("re:"):
            pattern = compiled(each[3:], path, key)
            if any(pattern.match(name) for name in layer.names):
                return True
        elif each in layer.names:
            return True
    return False
