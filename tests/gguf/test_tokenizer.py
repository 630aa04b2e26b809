"""The tokenizer of a GGUF file: ids equal llama.cpp's, and decode to the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quintet.deploy.config.gguf.tokenizer import tokenizer_of_gguf
from quintet.executor.checkpoints.gguf.parts import read_parts
from tests.gguf.vocabularies import (
    EXPECTED,
    KINDS,
    LLAMA_CPP,
    NUM_EXPECTED,
    SPECIAL,
    comparable_strings,
    ids_of_llama_cpp,
    is_comparable,
    strings,
    write_file,
)


def made(name: str, folder: Path) -> Tokenizer:
    """Return the tokenizer of a file of this kind."""
    write_file(KINDS[name], folder / "vocabulary.gguf")
    made_in = tokenizer_of_gguf(read_parts(folder / "vocabulary.gguf"), folder / "cache")
    return Tokenizer.from_file(str(made_in / "tokenizer.json"))


@pytest.mark.parametrize("name", KINDS)
def test_ids_equal_recorded_ids_of_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer, texts = made(name, tmp_path), strings(NUM_EXPECTED, seed=1)
    expected, with_bos = json.loads(EXPECTED.read_text())[name]
    for text, ids in zip(texts, expected, strict=True):
        if is_comparable(KINDS[name], text):
            assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
        if not any(token in text for token in SPECIAL):  # SentencePiece inserts a space after each
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.encode(text).ids for text in texts[:3]] == with_bos


@pytest.mark.whole
@pytest.mark.skipif(not LLAMA_CPP.exists(), reason="llama.cpp is not installed; recorded ids are compared")
@pytest.mark.parametrize("name", KINDS)
def test_ids_of_ten_thousand_strings_equal_llama_cpp(name: str, tmp_path: Path) -> None:
    tokenizer, texts = made(name, tmp_path), comparable_strings(KINDS[name], 10_000, seed=2)
    expected, _ = ids_of_llama_cpp({name: tmp_path / "vocabulary.gguf"}, texts)[name]
    differing = [
        text
        for text, ids in zip(texts, expected, strict=True)
        if tokenizer.encode(text, add_special_tokens=False).ids != ids
    ]
    assert len(texts) == 10_000 and differing == []
