"""The methods ``eagle`` and ``medusa``: formats of their heads, their memory, and rejections by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.deploy.config.model_folder import CONFIG, write_model, write_weights
from tests.deploy.resolve.test_resolve_draft_model import WINDOWS, config_of, flag, speculative_of

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
        ({"layernorms": True}, "layernorms is True"),
        ({"transformer_layer_architecture": "Qwen3DecoderLayer"}, "transformer_layer_architecture is 'Qwen3"),
    ],
)
def test_eagle_head_of_another_model_is_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    write_model(folder / "head", **({"num_hidden_layers": 1} | changes))
    with pytest.raises(ConfigError) as error:
        draft_of(folder, "eagle")
    assert message in str(error.value) and "head" in str(error.value)


MEDUSA = {"num_heads": 3, "num_hidden_layers": 1, "hidden_size": 64, "vocab_size": 100}
PLAIN_TARGET = {"model.embed_tokens.weight": [100, 64]}


def write_head(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "head").mkdir()
    (folder / "head" / "config.json").write_text(json.dumps(config))
    return folder / "head"


def test_medusa_heads_have_no_keys_and_values(folder: Path) -> None:
    write_model(folder / "target", **WINDOWS, max_window_layers=0)
    write_head(folder, MEDUSA)
    config = config_of(folder, speculative_config=flag(folder / "head", method="medusa"), dtype="float32")
    found = speculative_of(config).draft
    assert found is not None and (found.aux_layers, found.model.vocab_size) == ([2], 100)
    assert config.model.kv.draft_bytes == 0 and not any(group.layers for group in found.model.kv.groups)
    features = config.scheduler.max_num_seqs * 64
    assert found.weight_bytes == 4 * (3 * 64 * (64 + 100) + features)


def test_sizes_of_medusa_heads_are_those_of_their_tensors(folder: Path) -> None:
    head = write_head(folder, {"medusa_num_heads": 2, "medusa_num_layers": 1})
    write_weights(folder / "target" / "model.safetensors", PLAIN_TARGET)
    tensors = {
        f"medusa_head.{number}.{name}": shape
        for number in range(5)
        for name, shape in {"0.linear.weight": [64, 64], "0.linear.bias": [64], "1.weight": [100, 64]}.items()
    }
    write_weights(head / "medusa_lm_head.safetensors", tensors | {"model.norm.weight": [64]})
    found = draft_of(folder, "medusa", load_format="auto", max_num_seqs=4)
    assert found.weight_bytes == 2 * (5 * (64 * 64 + 64 + 100 * 64) + 4 * 64)


def test_pickled_medusa_heads_are_read_after_their_conversion(folder: Path) -> None:
    head = write_head(folder, {"medusa_num_heads": 1})
    write_weights(folder / "target" / "model.safetensors", PLAIN_TARGET)
    torch.save(
        {"0.0.linear.weight": torch.zeros(64, 64), "0.1.weight": torch.zeros(100, 64)},
        head / "medusa_lm_head.pt",
    )
    with pytest.raises(ConfigError, match="has pickled weights: run `quintet convert"):
        draft_of(folder, "medusa", load_format="auto")
    assert main(["convert", str(head)]) == 0
    assert draft_of(folder, "medusa", load_format="auto").model.vocab_size == 100


def test_plan_shows_medusa_heads(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = flag(write_head(folder, MEDUSA), method="medusa")
    flags = ["--device", "cpu", "--load-format", "dummy", "--kv-cache-memory", "1MiB"]
    assert main(["plan", str(folder / "target"), *flags, "--speculative-config", value, "--json"]) == 0
    draft = json.loads(capsys.readouterr().out)["draft"]
    assert (draft["architecture"], draft["kv_bytes_per_token"]) == ("MedusaHeads", 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "is for a model with hidden size 32, but"),
        ({"vocab_size": 90}, "is for a model with vocabulary size 90, but"),
        ({"num_heads": None}, "medusa_num_heads is missing"),
        ({"original_lm_head": True}, "original_lm_head is True"),
        ({"truncated_vocab_size": 50}, "truncated_vocab_size is 50; it must be equal to vocab_size"),
    ],
)
def test_medusa_heads_of_another_model_are_refused_by_name(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    write_head(folder, MEDUSA | changes)
    with pytest.raises(ConfigError) as error:
        draft_of(folder, "medusa")
    assert message in str(error.value) and "head" in str(error.value)


def test_plan_counts_a_prediction_layer_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is part of the draft model with the method ``mtp``, and not loaded without it."""
    served = {"model.embed_tokens.weight": [100, 64], "model.layers.1.mlp.up_proj.weight": [128, 64]}
    layer = "model.mtp_layers.0"
    predictor = {f"{layer}.input_proj.weight": [64, 128], f"{layer}.mlp.up_proj.weight": [128, 64]}
    write_model(folder / "target", architectures=["MiMoForCausalLM"])
    write_weights(folder / "target" / "model.safetensors", served | predictor)
    flags = ["plan", str(folder / "target"), "--device", "cpu", "--max-num-seqs", "1", "--json"]
    plans = []
    for drafts in ([], ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 2})]):
        assert main([*flags, *drafts]) == 0
        plans.append(json.loads(capsys.readouterr().out))
    count = 100 * 64 + 128 * 64
    assert [(each["num_parameters"], each["weight_bytes"]) for each in plans] == 2 * [(count, 2 * count)]
    assert plans[0]["draft"] is None
    assert plans[1]["draft"]["weight_bytes"] == 2 * 2 * 128 * 64
    assert plans[1]["draft"]["kv_bytes_per_token"] == 2 * (2 * 2 * 16 + 64)
