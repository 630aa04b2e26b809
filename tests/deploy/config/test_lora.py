"""``--lora-modules``, and the files of adapters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from tests.deploy.config.model_folder import write_model, write_weights
from tests.deploy.config.test_vllm_flags import parsed

from quintet.deploy.cli.main import main
from quintet.deploy.config.flag_table import make_options
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.config.model.lora import adapters_config, memory_bytes
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import AdapterConfig


def write_files(folder: Path, weights: bytes = b"weights", **values: Any) -> Path:
    """Write an adapter. Its weights are not read."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8} | values))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def adapters(folder: Path, *given: str, device: str = "cpu", **options: Any) -> list[AdapterConfig]:
    write_model(folder / "model")
    chosen = dataclasses.replace(Options(), lora_modules=[*given], **options)
    return adapters_config(chosen, read_facts(folder / "model"), device)


def test_forms_of_the_flag(tmp_path: Path) -> None:
    one, two = write_files(tmp_path / "one"), write_files(tmp_path / "a=b", b"others")
    as_json = json.dumps({"name": "third", "path": str(one), "base_model_name": "any"})
    found = adapters(tmp_path, f"first={one}", f"second={two}", as_json)
    assert [(each.name, each.path) for each in found] == [
        ("first", str(one)),
        ("second", str(two)),
        ("third", str(one)),
    ]
    assert found[0].digest == found[2].digest != found[1].digest
    assert adapters(tmp_path) == []


def test_the_digest_covers_both_files(tmp_path: Path) -> None:
    digests = {
        adapters(tmp_path, f"a={write_files(tmp_path / 'a', weights, lora_alpha=alpha)}")[0].digest
        for weights in (b"1", b"2")
        for alpha in (8, 16)
    }
    assert len(digests) == 4 and {len(each) for each in digests} == {32}


def test_memory_of_padded_ranks(tmp_path: Path) -> None:
    """Every adapter has the ranks of the largest one in memory, in the model's dtype."""
    for rank, names in ((1, "q"), (16, "qk")):
        tensors = {f"{name}.lora_A.weight": torch.ones(rank, 10) for name in names}
        write_files(tmp_path / str(rank), save(tensors))
    found = adapters(tmp_path, *(f"{rank}={tmp_path / str(rank)}" for rank in (1, 16)))
    assert memory_bytes(found, 2) == 2 * 2 * (16 * 10) * 2
    assert memory_bytes([], 2) == 0


def test_damaged_weights(tmp_path: Path) -> None:
    found = adapters(tmp_path, f"a={write_files(tmp_path / 'a')}")
    with pytest.raises(ConfigError, match=r"adapter_model.safetensors: not a readable safetensors file"):
        memory_bytes(found, 2)


def test_flags_of_vllm() -> None:
    options, _ = parsed(
        "--enable-lora", "--lora-modules", "a=b", "c=d", "--max-lora-rank", "64", "--max-loras", "2"
    )
    assert options.lora_modules == ["a=b", "c=d"]


@pytest.mark.parametrize(
    "given", ["a=/b", ["a=/b"], {"name": "a", "path": "/b"}, [{"name": "a", "path": "/b"}]]
)
def test_values_of_a_call_or_a_file(given: object) -> None:
    [value] = make_options({"lora_modules": given}, "LLM(...)").lora_modules
    assert value == "a=/b" or json.loads(value) == {"name": "a", "path": "/b"}


@pytest.mark.parametrize("last", ["b=/path", "b=owner/name", '{"name": "b", "path": "/path"}'])
def test_the_last_adapter_is_not_the_model(last: str) -> None:
    assert parsed("--lora-modules", "a=/one", last)[0].lora_modules == ["a=/one", last]
    options, _ = parsed("--lora-modules", "a=/one", last, "owner/model")
    assert (options.model, options.lora_modules) == ("owner/model", ["a=/one", last])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("name", "give NAME=PATH"),
        ("=path", "give NAME=PATH"),
        ('{"name": "a"}', "give NAME=PATH"),
        ('{"name"', "not JSON"),
        ('{"name": "a", "path": "b", "rank": 3}', "'rank'"),
        ("a=/nowhere/at/all", "folder not found"),
    ],
)
def test_malformed_values(given: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected):
        adapters(tmp_path, given)


def test_names_are_unique(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "one")
    with pytest.raises(ConfigError, match="the name 'a' is already"):
        adapters(tmp_path, f"a={folder}", f"a={folder}")
    with pytest.raises(ConfigError, match="the name 'base' is already"):
        adapters(tmp_path, f"base={folder}", served_model_name=["base"])


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
        ({"lora_alpha": "16"}, "'lora_alpha' is '16'; it must be a number"),
        ({"lora_alpha": float("nan")}, "'lora_alpha' is nan; it must be a number"),
        ({"lora_alpha": 10**400}, "'lora_alpha' is 10+.*; it must be a number"),
        ({"alpha_pattern": {"q_(": 3}}, "not a regular expression"),
        ({"alpha_pattern": [3]}, "alpha_pattern is .3.; it must be an object"),
    ],
)
def test_unsupported_adapters(values: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected):
        adapters(tmp_path, f"a={write_files(tmp_path / 'a', **values)}")


def test_missing_weights(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "a")
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(
        ConfigError, match=r"adapter_model.safetensors does not exist.*save it again with PEFT"
    ):
        adapters(tmp_path, f"a={folder}")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"nnodes": 2}, "--nnodes 2"),
        ({"device": "cuda"}, "not supported on GPUs"),
    ],
)
def test_unsupported_settings(options: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=expected):
        adapters(tmp_path, f"a={write_files(tmp_path / 'a')}", **options)


def test_plan_shows_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_model(tmp_path / "model")
    write_weights(folder / "model.safetensors", {"a": [100, 50]})
    weights = save({"q.lora_A.weight": torch.zeros(700)})
    adapter = write_files(tmp_path / "a", weights)
    words = ["plan", str(folder), "--device", "cpu", "--lora-modules", f"sql={adapter}"]
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["adapters"] == {"sql": len(weights)}
    assert main(words) == 0
    assert "LoRA adapter      sql: 2.8 KiB on disk" in capsys.readouterr().out
