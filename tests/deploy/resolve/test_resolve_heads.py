"""The method ``eagle``: formats of its heads, their memory, and rejections by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.deploy.config.model_folder import CONFIG, write_model, write_weights
from tests.deploy.resolve.test_resolve_draft_model import config_of, flag, speculative_of

from quintet.deploy.cli.main import main
from quintet.wire.config import DraftModelConfig
from quintet.wire.errors import ConfigError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path / "target")
    return tmp_path


def draft_of(folder: Path, method: str, **options: Any) -> DraftModelConfig:
    found = speculative_of(
        config_of(folder, speculative_config=flag(folder / "head", method=method), **options)
    )
    assert found.method == method and found.draft is not None
    return found.draft


def test_eagle_head_reads_the_last_hidden_states(folder: Path) -> None:
    write_model(folder / "head", num_hidden_layers=1)
    found = draft_of(folder, "eagle", dtype="float32")
    assert (found.aux_layers, found.model.vocab_size, found.model.dtype) == ([2], 100, "float32")
    assert found.model.kv.bytes_per_block == 2 * 2 * 16 * 4 * 16


def test_eagle_head_of_vllm_is_read(folder: Path) -> None:
    write_model(folder / "head", num_hidden_layers=1)
    expected = draft_of(folder, "eagle")
    layer = CONFIG | {"num_hidden_layers": 1}
    outer = {
        "architectures": ["EAGLEModel"],
        "model_type": "eagle",
        "model": layer,
        "truncated_vocab_size": 100,
    }
    (folder / "head" / "config.json").write_text(json.dumps(outer))
    found = draft_of(folder, "eagle")
    assert (found.model.kv, found.weight_bytes) == (expected.model.kv, expected.weight_bytes)


def test_copies_of_the_served_model_are_not_memory_of_an_eagle_head(folder: Path) -> None:
    write_model(folder / "head", num_hidden_layers=1)
    sizes = []
    for copies in ({}, {"embed_tokens.weight": [100, 64], "lm_head.weight": [100, 64]}):
        tensors = {"fc.weight": [64, 128], "layers.0.mlp.up_proj.weight": [128, 64], **copies}
        write_weights(folder / "head" / "model.safetensors", tensors)
        write_weights(folder / "target" / "model.safetensors", {"model.embed_tokens.weight": [100, 64]})
        sizes.append(draft_of(folder, "eagle", load_format="auto").weight_bytes)
    assert sizes[0] == sizes[1]


def test_pickled_head_is_read_after_its_conversion(folder: Path) -> None:
    write_model(folder / "head", num_hidden_layers=1)
    (folder / "head" / "tokenizer.json").unlink()
    write_weights(folder / "target" / "model.safetensors", {"model.embed_tokens.weight": [100, 64]})
    torch.save({"fc.weight": torch.zeros(64, 128)}, folder / "head" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="has pickled weights: run `quintet convert") as error:
        draft_of(folder, "eagle", load_format="auto")
    assert main(str(error.value).split("`")[1].split()[1:]) == 0
    assert draft_of(folder, "eagle", load_format="auto").aux_layers == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "is for a model with hidden size 32, but"),
        ({"vocab_size": 90}, "is for a model with vocabulary size 90, but"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; it must be 1"),
        ({"add_para_norm": True}, "add_para_norm is True"),
        ({"truncated_vocab_size": 50}, "truncated_vocab_size is 50; it must be equal to vocab_size"),
        ({"transformer_layer_config": {}}, "only the format of EAGLE's authors is supported"),
    ],
)
def test_eagle_head_of_another_model_is_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    write_model(folder / "head", **({"num_hidden_layers": 1} | changes))
    with pytest.raises(ConfigError) as error:
        draft_of(folder, "eagle")
    assert message in str(error.value) and "head" in str(error.value)
