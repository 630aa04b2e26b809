"""A GGUF file of a model gives the tokens of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.gguf_writer import write_model

from quintet.deploy.resolve import tokenizer_files
from tests.gguf.families import ROWS
from tests.models.equal import load, one_torch_thread
from tests.models.test_equal import check_once, made


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tokenizer_files, "_default_cache", lambda: tmp_path / "tokenizers")
    with one_torch_thread():
        yield


@pytest.mark.parametrize("family", ROWS)
def test_a_files_tokens_are_its_models(family: str, tmp_path: Path) -> None:
    row = ROWS[family]
    expected = made(row, tmp_path)
    file = tmp_path / "model.gguf"
    write_model(tmp_path, file, "F32")
    check_once(load(file), row, expected)
