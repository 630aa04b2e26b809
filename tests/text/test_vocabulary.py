"""Vocabularies read without the tokenizers library equal the library's; unsupported files are left to it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

import quintet.deploy
from quintet.detokenizer_proc.vocabulary import Vocabulary, load_vocabulary, read_plain
from quintet.wire.errors import ConfigError

EMBEDDED = sorted((Path(quintet.deploy.__path__[0]) / "embedded").rglob("tokenizer.json"))
PLAIN = ("byte_level", "sentencepiece")


def check_equal(path: Path, num_ids: int) -> None:
    ours = read_plain(path, num_ids)
    theirs = Vocabulary.of(Tokenizer.from_file(str(path)), num_ids)
    assert ours is not None
    assert (list(ours.tokens), ours.special, ours.decoder) == (
        list(theirs.tokens),
        theirs.special,
        theirs.decoder,
    )


@pytest.mark.parametrize("path", EMBEDDED, ids=lambda path: path.parent.name)
def test_embedded_vocabularies_equal_the_librarys(path: Path) -> None:
    check_equal(path, 0)


@pytest.mark.parametrize("more", [0, 50])
@pytest.mark.parametrize("style", PLAIN)
def test_plain_files_equal_the_librarys(
    tokenizers_by_style: dict[str, Tokenizer], style: str, more: int, tmp_path: Path
) -> None:
    tokenizer = tokenizers_by_style[style]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    check_equal(tmp_path / "tokenizer.json", tokenizer.get_vocab_size() + more)


def skip_ids(file: dict[str, Any]) -> None:
    vocab = file["model"]["vocab"]
    merged = next(token for token in reversed(vocab) if len(token) > 1)
    vocab[merged] = max(vocab.values()) + 1000  # ids have gaps: the last one exceeds the number of tokens
    file["added_tokens"] = []
    file["post_processor"] = None
    file["model"]["merges"] = []


def test_gaps_between_ids_are_empty(tokenizers_by_style: dict[str, Tokenizer], tmp_path: Path) -> None:
    path = changed(tokenizers_by_style["byte_level"], tmp_path, skip_ids)
    check_equal(path, 0)
    check_equal(path, 3000)


def shift_an_id(file: dict[str, Any]) -> None:
    file["added_tokens"][-1]["id"] += 1


def repeat(file: dict[str, Any]) -> None:
    file["added_tokens"].append(file["added_tokens"][-1])


def duplicate_an_id(file: dict[str, Any]) -> None:
    vocab = file["model"]["vocab"]
    first, second, *_ = vocab
    vocab[first] = vocab[second]


def name_no_model(file: dict[str, Any]) -> None:
    del file["model"]["type"]


def changed(tokenizer: Tokenizer, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    file = json.loads(tokenizer.to_str())
    change(file)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(file))
    return path


@pytest.mark.parametrize("change", [shift_an_id, repeat, duplicate_an_id, name_no_model])
def test_ambiguous_files_are_left_to_the_library(
    tokenizers_by_style: dict[str, Tokenizer], tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    assert read_plain(changed(tokenizers_by_style["byte_level"], tmp_path, change), 0) is None


@pytest.mark.parametrize("style", ["metaspace", "wordpiece"])
def test_other_decoders_are_left_to_the_library(
    tokenizers_by_style: dict[str, Tokenizer], style: str, tmp_path: Path
) -> None:
    tokenizers_by_style[style].save(str(tmp_path / "tokenizer.json"))
    assert read_plain(tmp_path / "tokenizer.json", 0) is None
    assert load_vocabulary(tmp_path, 0).tokenizer is not None


@pytest.mark.parametrize("content", [b"{}", b"", b"[1", b'{"model": {"type": "BPE", "vocab": {"\xff": 0}}}'])
def test_broken_files_are_left_to_the_library(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: the tokenizers library cannot read it"):
        load_vocabulary(tmp_path, 0)
