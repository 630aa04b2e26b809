"""Cache of converted tokenizers."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.gguf.vocabularies import KINDS, write_file

from quintet.deploy.config.model.tokenizer_files import tokenizer_folder
from quintet.wire.errors import ConfigError


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with a slow tokenizer; its conversion is simulated."""

    def convert(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        (Path(command[-1]) / "tokenizer.json").write_text("{}")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", convert)
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n")
    return folder


@pytest.mark.parametrize("name", ["vocab.txt", "added_tokens.json", "tokenizer_config.json"])
def test_a_changed_file_is_converted_again(name: str, slow: Path, tmp_path: Path) -> None:
    first = tokenizer_folder(slow, tmp_path / "cache")
    (slow / name).write_text("changed")
    second = tokenizer_folder(slow, tmp_path / "cache")
    assert first != second == tokenizer_folder(slow, tmp_path / "cache")


def test_an_interrupted_conversion_is_repeated(
    slow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(command: list[str], **options: Any) -> None:
        (Path(command[-1]) / "tokenizer.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(subprocess, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tokenizer_folder(slow, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    assert (tokenizer_folder(slow, tmp_path / "cache") / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize("is_gguf", [False, True])
def test_a_cache_that_is_not_writable_is_named(is_gguf: bool, slow: Path, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_file(KINDS["SentencePiece"], file)
    with pytest.raises(ConfigError, match=r"the cache .*model\.gguf/cache is not writable .*XDG_CACHE_HOME"):
        tokenizer_folder(file if is_gguf else slow, file / "cache")
