"""Texts as tokens, in windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from quintet.deploy.config.card import ModelFacts
from quintet.deploy.config.tokenizer_files import tokenizer_folder
from quintet.deploy.tools.quantize.settings import WINDOW
from quintet.wire.errors import ConfigError


def window_of(max_model_len: int) -> int:
    """Return how many tokens a model of so many positions reads at a time: one is left for what it predicts last.

    Raises `ConfigError` for a model that could predict nothing.
    """
    if max_model_len < 3:
        raise ConfigError(f"the model reads {max_model_len} tokens at most: there is nothing to predict")
    return min(WINDOW, max_model_len - 1)


def tokenizer_of(model: Path) -> Path:
    """Return a folder with the ``tokenizer.json`` of a model that will be quantized: what is written has it, too."""
    return tokenizer_folder(model, advice="put the tokenizer.json of its model there first")


def windows_of_text(facts: ModelFacts, text: str) -> list[list[int]]:
    """Return a text as the model's tokens, in windows. Raises `ConfigError` where there is nothing to predict."""
    tokenizer = Tokenizer.from_file(str(tokenizer_of(facts.path) / "tokenizer.json"))
    first, window = first_tokens(tokenizer), window_of(facts.max_model_len)
    if len(first) >= window:
        raise ConfigError(
            f"texts begin with {len(first)} tokens, and the model reads {window} at a time: there is nothing to predict"
        )
    windows = [each for each in windows_of(tokenizer, [text], first, window) if len(each) > 1]
    if not windows:
        raise ConfigError("the text has less than two tokens: there is nothing to predict")
    return windows


def windows_of(
    tokenizer: Tokenizer, texts: Iterable[str], first: Sequence[int], window: int = WINDOW
) -> Iterator[list[int]]:
    """Yield texts in windows, each behind the tokens that texts begin with."""
    step = window - len(first)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for begin in range(0, len(ids), step):
            yield [*first, *ids[begin : begin + step]]


def first_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return what the tokenizer puts before every text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=each).ids for each in (False, True))
    return whole[: whole.index(plain[0])] if plain and plain[0] in whole else []
