"""Invalid values in a model folder's JSON files: each is rejected in one line or ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.deploy.config.model_folder import write_model, write_weights

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.weights import read_weight_facts
from quintet.wire.errors import ConfigError

RUN_DIR = Path("/tmp/quintet-test")
ODD: list[Any] = [
    *(None, True, False, -1, 0, 1.5, 1e308, 2**70, "", "2", "\ud800", [], {}, [1], [True], [1.5], [2**70], ["a"]),
    *([None], [[1]], {"a": 1}, {"content": 5}, {"content": "<end>"}, {"content": "<end>", "id": "x"}),
    *([{"content": "<end>"}], [{"content": "<end>", "id": None}], [{"content": "<end>", "id": True}]),
    *([{"name": "default", "template": "\ud800"}], [{"name": 1, "template": "x"}], {"default": 1}),
]  # fmt: skip
PLACES = [
    ("config.json", "architectures"),
    ("config.json", "dtype"),
    ("config.json", "eos_token_id"),
    ("generation_config.json", "do_sample"),
    ("generation_config.json", "eos_token_id"),
    ("generation_config.json", "max_new_tokens"),
    ("generation_config.json", "temperature"),
    ("generation_config.json", "top_k"),
    ("tokenizer_config.json", "chat_template"),
    ("tokenizer_config.json", "eos_token"),
    ("chat_template.json", "chat_template"),
    ("tokenizer.json", "added_tokens"),
]


def write(path: Path, changes: dict[str, Any]) -> None:
    """Change some of a file's values."""
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))


@pytest.mark.parametrize(("file", "key"), PLACES)
def test_invalid_value_is_rejected_in_one_line_or_ignored(tmp_path: Path, file: str, key: str) -> None:
    for number, odd in enumerate(ODD):
        folder = write_model(tmp_path / str(number))
        if file.startswith("tokenizer"):  # so that the end of a sequence is read
            write(folder / "config.json", {"eos_token_id": None})
            write(folder / "tokenizer_config.json", {"eos_token": "<end>"})
        write(folder / file, {key: [odd] if key == "architectures" else odd})
        try:
            config = resolve(Options(model=str(folder), executor="mock"), RUN_DIR).config
        except ConfigError as error:
            assert "\n" not in str(error), odd
        else:
            msgspec.json.encode(config)
            assert all(type(token_id) is int for token_id in config.model.eos_token_ids), odd


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("q4.gguf", r"has no config\.json, but GGUF files: give one, for example .*q4\.gguf"),
        ("adapter_config.json", r"is an adapter of 'owner/base', not a model: serve that model"),
        ("params.json", r"in Mistral's own format \(params\.json\)"),
        ("other.json", r"config\.json does not exist; a model folder has"),
    ],
)
def test_a_folder_without_a_config_is_explained(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / file).write_text('{"base_model_name_or_path": "owner/base"}')
    with pytest.raises(ConfigError, match=words):
        resolve(Options(model=str(tmp_path), executor="mock"), RUN_DIR)


def test_an_adapter_with_the_config_of_its_model_is_explained(tmp_path: Path) -> None:
    """Axolotl writes ``config.json`` beside the adapter."""
    folder = write_model(tmp_path)
    write_weights(folder / "adapter_model.safetensors", {"base_model.model.lm_head.lora_A.weight": [4, 64]})
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "owner/base"}')
    with pytest.raises(ConfigError, match=r"is an adapter of 'owner/base', not a model: serve that model"):
        resolve(Options(model=str(folder)), RUN_DIR)


def test_an_adapter_beside_weights_is_not_read(tmp_path: Path) -> None:
    write_weights(tmp_path / "adapter_model.safetensors", {"base_model.model.lora_A.weight": [4]})
    write_weights(tmp_path / "model-00001-of-00001.safetensors", {"x": [10]})
    assert read_weight_facts(tmp_path).num_parameters == 10
