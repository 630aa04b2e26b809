"""Adapters that do not fit their model: errors that name module and file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.equality import load
from tests.models.lora.random_adapters import RandomAdapter, write_adapter
from tests.models.random_checkpoints import write_checkpoint
from tests.models.rows import llama, moe, opt

from quintet.executor.backends.registry import make_worker
from quintet.executor.lora.adapters import Adapters, read_adapter
from quintet.wire.errors import ConfigError
from quintet.wire.model_files import AdapterConfig, adapter_digest_of

Q = "model.layers.1.self_attn.q_proj"
A, B = (f"base_model.model.{Q}.lora_{half}.weight" for half in "AB")


def changed(folder: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of an adapter."""
    path = folder / "adapter_model.safetensors"
    kept = load_file(path) | tensors
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, path)


@pytest.mark.parametrize(
    ("tensors", "expected"),
    [
        ({A: None}, r"q_proj' has lora_B \[64, 4\]; expected lora_A \[rank, inputs\]"),
        ({A: torch.ones(3, 64)}, r"lora_A \[3, 64\], lora_B \[64, 4\]"),
        ({A: torch.ones(0, 64), B: torch.ones(64, 0)}, r"lora_A \[0, 64\], lora_B \[64, 0\]"),
        (
            {A: torch.ones(4, 65)},
            "65 inputs and 64 outputs; the model has 64 and 64: the adapter belongs to another",
        ),
        ({B: torch.ones(63, 4)}, "64 inputs and 63 outputs"),
        ({A: torch.ones(4, 64, dtype=torch.int32)}, "I32.* is not supported"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 211)},
            "lora_embedding_A.*not supported",
        ),
        (
            {f"base_model.model.{Q}x.lora_{half}.weight": torch.ones(4, 4) for half in "AB"},
            "q_projx' is no linear layer of LlamaForCausalLM",
        ),
        (
            {
                "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64),
                "base_model.model.lm_head.lora_B.weight": torch.ones(211, 4),
            },
            "'lm_head' is no linear layer",
        ),
    ],
)
def test_tensors(tensors: dict[str, torch.Tensor | None], expected: str, tmp_path: Path) -> None:
    write_checkpoint(llama.ROWS["llama"], tmp_path / "model")
    write_adapter(RandomAdapter(("q_proj", "v_proj")), tmp_path / "model", tmp_path / "a")
    changed(tmp_path / "a", tensors)
    with pytest.raises(ConfigError, match=expected):
        load(tmp_path / "model", lora_modules=[f"a={tmp_path / 'a'}"])


def test_experts(tmp_path: Path) -> None:
    write_checkpoint(moe.ROWS["mixtral"], tmp_path / "model")
    write_adapter(RandomAdapter(("q_proj",)), tmp_path / "model", tmp_path / "a")
    name = "base_model.model.model.layers.0.block_sparse_moe.experts.1.w1"
    changed(
        tmp_path / "a",
        {f"{name}.lora_A.weight": torch.ones(4, 64), f"{name}.lora_B.weight": torch.ones(112, 4)},
    )
    with pytest.raises(ConfigError, match=r"experts.1.w1' is no linear layer"):
        load(tmp_path / "model", lora_modules=[f"a={tmp_path / 'a'}"])


@pytest.mark.parametrize("layers", ["model.layers", "layers", "model.language_model.layers"])
def test_layers_of_other_stages(layers: str, tmp_path: Path) -> None:
    """All spellings of a module's name count."""
    (tmp_path / "adapter_config.json").write_text("{}")
    tensors = {f"base_model.model.{layers}.1.q_proj.lora_{half}.weight": torch.ones(4, 4) for half in "AB"}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = AdapterConfig(name="a", path=str(tmp_path), digest=adapter_digest_of(tmp_path))
    adapters = Adapters([config], torch.float32, torch.device("cpu"))
    adapters.check_used("LlamaForCausalLM", "model.", {"model.layers.1"})
    with pytest.raises(ConfigError, match=rf"{layers}.1.q_proj' is no linear layer"):
        adapters.check_used("LlamaForCausalLM", "model.", {"model.layers.11"})


def test_a_layer_of_logits(tmp_path: Path) -> None:
    write_checkpoint(opt.ROWS["opt 350m"], tmp_path / "model")
    write_adapter(RandomAdapter(("project_in", "project_out")), tmp_path / "model", tmp_path / "a")
    with pytest.raises(ConfigError, match=r"project_out' is no linear layer"):
        load(tmp_path / "model", lora_modules=[f"a={tmp_path / 'a'}"])


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ({"lora_alpha": 8}, 2.0),
        ({}, 2.0),
        ({"lora_alpha": 8, "use_rslora": True}, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"self_attn.q_proj": 2}}, 0.5),
        ({"lora_alpha": 8, "alpha_pattern": {r"layers\.[01]\..*q_proj": 2, "v_proj": 1}}, 0.5),
        ({"lora_alpha": 8, "alpha_pattern": {r"layers\.1\..*q_proj": 2, "q_proj": 16}}, 0.5),
        ({"lora_alpha": 8, "alpha_pattern": {"q_proj": 16, Q: 2}}, 4.0),
        ({"lora_alpha": 8, "alpha_pattern": {"proj": 2}}, 2.0),
    ],
)
def test_scales(values: dict[str, object], scale: float, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    save_file({A: torch.ones(4, 3), B: torch.ones(5, 4)}, tmp_path / "adapter_model.safetensors")
    config = AdapterConfig(name="a", path=str(tmp_path), digest=adapter_digest_of(tmp_path))
    [(name, low)] = read_adapter(config).items()
    assert name == Q and low.a.shape == (4, 3) and bool((low.b == scale).all())


def test_files_that_changed_after_the_start(tmp_path: Path) -> None:
    """An executor that is restarted reads them again."""
    write_checkpoint(llama.ROWS["llama"], tmp_path / "model")
    write_adapter(RandomAdapter(("q_proj",)), tmp_path / "model", tmp_path / "a")
    loaded = load(tmp_path / "model", lora_modules=[f"a={tmp_path / 'a'}"])
    changed(tmp_path / "a", {B: torch.ones(64, 4)})
    with pytest.raises(ConfigError, match=r"'a': the files in .* have changed since the server started"):
        make_worker(loaded.config)
