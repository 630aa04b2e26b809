"""Tokenization of texts into windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quintet.deploy.config.model.hf_config import ModelFacts
from quintet.deploy.config.model.tokenizer_files import tokenizer_folder
from quintet.wire.errors import ConfigError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

WINDOW = 512
"""Maximum window length in tokens; windows of a text are independent of each other."""
MAX_CALIBRATION_TOKENS = 1 << 15
"""Limit of calibration tokens; the inputs of one layer for all of them are in memory at once."""


def window_of(max_model_len: int) -> int:
    """Return the window length for a context length, with one position left for the last prediction.

    Raises `ConfigError` if the context is too short.
    """
    if max_model_len < 3:
        raise ConfigError(f"the model's context length is {max_model_len} tokens; at least 3 are needed")
    return min(WINDOW, max_model_len - 1)


def tokenizer_of(model: Path) -> Path:
    """Return a folder with the ``tokenizer.json`` of a model, which the output needs too."""
    return tokenizer_folder(model, advice="copy the tokenizer.json of the model there first")


def windows_of_text(facts: ModelFacts, text: str) -> list[list[int]]:
    """Tokenize a text into windows. Raises `ConfigError` without a tokenizer, or if the text or the context is too short."""
    from tokenizers import Tokenizer  # not needed for --help

    tokenizer = Tokenizer.from_file(str(tokenizer_of(facts.path) / "tokenizer.json"))
    first, window = first_tokens(tokenizer), window_of(facts.spec.reach)
    if len(first) >= window:
        raise ConfigError(
            f"the tokenizer adds {len(first)} tokens to each text, but the window has only {window} tokens"
        )
    windows = [each for each in windows_of(tokenizer, [text], first, window) if len(each) > 1]
    if not windows:
        raise ConfigError("the text has fewer than two tokens; use a longer text")
    return windows


def windows_of(
    tokenizer: Tokenizer, texts: Iterable[str], first: Sequence[int], window: int = WINDOW
) -> Iterator[list[int]]:
    """Yield texts in windows, each prefixed with the tokens ``first``."""
    step = window - len(first)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for begin in range(0, len(ids), step):
            yield [*first, *ids[begin : begin + step]]


def first_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that the tokenizer adds before each text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=each).ids for each in (False, True))
    return whole[: whole.index(plain[0])] if plain and plain[0] in whole else []
