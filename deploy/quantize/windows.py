"""Texts as tokens, in windows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from quintet.deploy.quantize.settings import WINDOW
from quintet.deploy.resolve.tokenizer_files import tokenizer_folder
from quintet.wire.errors import ConfigError


def windows_of_text(model: Path, text: str) -> list[list[int]]:
    """Return a text as the model's tokens. Raises `ConfigError` where there is nothing to predict."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder(model) / "tokenizer.json"))
    windows = [each for each in windows_of(tokenizer, [text], first_tokens(tokenizer)) if len(each) > 1]
    if not windows:
        raise ConfigError("the text has less than two tokens: there is nothing to predict")
    return windows


def windows_of(tokenizer: Tokenizer, texts: Iterable[str], first: Sequence[int]) -> Iterator[list[int]]:
    """Yield texts in windows, each behind the tokens that texts begin with."""
    step = WINDOW - len(first)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        for begin in range(0, len(ids), step):
            yield [*first, *ids[begin : begin + step]]


def first_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return what the tokenizer puts before every text."""
    plain, whole = (tokenizer.encode("a", add_special_tokens=each).ids for each in (False, True))
    return whole[: whole.index(plain[0])] if plain and plain[0] in whole else []
