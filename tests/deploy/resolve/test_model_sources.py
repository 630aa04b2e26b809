"""Folders of models and tokenizers: which are found, and the one-line errors of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quintet.deploy.config.model.source import locate_model
from quintet.deploy.config.model.tokenizer_files import tokenizer_folder
from quintet.wire.errors import ConfigError


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "a/b/c"])
def test_missing_folder_is_a_one_line_error(name: str) -> None:
    with pytest.raises(ConfigError, match=f"MODEL '{name}': folder not found$"):
        locate_model(name, with_weights=True)


def test_offline_hub_name_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"MODEL 'example/absent'.*HF_HUB_OFFLINE is set"):
        locate_model("example/absent", with_weights=True)
    with pytest.raises(ConfigError, match="a folder or one of: smollm2"):
        locate_model("smolm2", with_weights=True)


def test_a_folder_without_any_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json.*--tokenizer"):
        tokenizer_folder(tmp_path)


def test_a_slow_tokenizer_is_converted_once(tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "bert"}')
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello"]))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    converted = tokenizer_folder(folder, cache=tmp_path / "cache")
    assert "hello" in json.loads((converted / "tokenizer.json").read_text())["model"]["vocab"]
    before = (converted / "tokenizer.json").stat().st_mtime_ns
    assert tokenizer_folder(folder, cache=tmp_path / "cache") == converted
    assert (converted / "tokenizer.json").stat().st_mtime_ns == before


def test_unconvertible_tokenizer_is_a_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=r"only tokenizer\.model, and transformers could not.*--tokenizer"):
        tokenizer_folder(tmp_path, cache=tmp_path / "cache")
