"""Checkpoints with multi-token prediction layers: the reader skips them, under each family's names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from bench.quantization import layers as formats
from safetensors.torch import load_file, save_file
from tests.models.checkpoints import quantized
from tests.models.equality import load, run
from tests.models.random_checkpoints import Row, write_checkpoint
from tests.models.rows import latent, llama, moe, states
from tests.models.test_engine import changed

from quintet.wire.errors import ConfigError

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [3]]


def mtp_tensors(layer: int) -> list[str]:
    """Return DeepSeek's tensors: a whole layer, an embedding and an output layer, and the projection that joins them."""
    parts = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    of_layer = ("input_layernorm", "self_attn.o_proj", "mlp.gate", "mlp.experts.0.down_proj")
    return [f"model.layers.{layer}.{name}.weight" for name in (*parts, *of_layer)]


CASES: dict[str, tuple[Row, list[str], dict[str, int]]] = {
    "deepseek v3": (latent.ROWS["deepseek v3"], mtp_tensors(3), {}),
    "deepseek v3, two": (
        latent.ROWS["deepseek v3"],
        mtp_tensors(3) + mtp_tensors(4),
        {"num_nextn_predict_layers": 2},
    ),
    "glm4 moe": (moe.ROWS["glm4 moe"], mtp_tensors(3), {"num_nextn_predict_layers": 1}),
    "glm 4.7 flash": (latent.ROWS["deepseek v3, as glm 4.7 flash"], mtp_tensors(3), {}),
    "ling 2": (moe.ROWS["glm4 moe, as ling 2"], mtp_tensors(3), {"num_nextn_predict_layers": 0}),
    "a family that is not known for it": (
        llama.ROWS["qwen2"],
        mtp_tensors(3),
        {"num_nextn_predict_layers": 1},
    ),
    "qwen3 next": (
        states.ROWS["qwen3 next"],
        ["mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"],
        {},
    ),
    "mimo": (
        llama.ROWS["qwen2, as mimo"],
        [f"model.mtp_layers.0.{name}.weight" for name in ("input_proj", "token_layernorm", "mlp.up_proj")],
        {"num_nextn_predict_layers": 1},
    ),
    "ernie 4.5 moe": (
        moe.ROWS["ernie 4.5 moe"],
        ["model.mtp_block.0.mlp.up_proj.weight", "model.mtp_linear_proj.0.weight"],
        {"num_nextn_predict_layers": 1},
    ),
    "nemotron h": (states.ROWS["nemotron h"], ["mtp.layers.0.eh_proj.weight"], {}),
}


def add(folder: Path, names: list[str], hf_config: dict[str, int]) -> None:
    """Add tensors of these names to the checkpoint, and keys to its config."""
    path = folder / "model.safetensors"
    save_file(load_file(path) | {name: torch.ones(3, 2) for name in names}, path)
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_bytes()) | hf_config))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("name", CASES)
def test_mtp_layers_are_skipped(name: str, tmp_path: Path) -> None:
    row, names, hf_config = CASES[name]
    write_checkpoint(row, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert not set(names) & set(tensors)
    before = load(tmp_path)
    expected = run(before, changed(before.config), PROMPTS).outputs
    add(tmp_path, names, hf_config)
    loaded = load(tmp_path)
    assert run(loaded, changed(loaded.config), PROMPTS).outputs == expected


def test_additional_layer_is_rejected_for_other_families(tmp_path: Path) -> None:
    write_checkpoint(llama.ROWS["qwen2"], tmp_path)
    add(tmp_path, mtp_tensors(3), {})
    with pytest.raises(ConfigError, match=r"model\.layers\.3\..* does not have it"):
        load(tmp_path)


@pytest.mark.whole
def test_deepseek_mtp_layers_in_fp8_are_skipped(tmp_path: Path) -> None:
    """In fp8 by blocks, experts included, as published; the prediction layer as well."""
    settings = {**quantized.SETTINGS, **latent.SMALL, **latent.ROUTED, "num_hidden_layers": 3}
    config = transformers.DeepseekV3Config(**settings)
    ours, plain = quantized.write(tmp_path, formats.fp8(block=True), config)
    kinds = {"self_attn.o_proj", "mlp.experts.0.down_proj", "eh_proj"}
    path = ours / "model.safetensors"
    further = {f"model.layers.3.{name}.weight": torch.ones(3, 2).to(torch.float8_e4m3fn) for name in kinds}
    scales = {f"{name}_scale_inv": torch.ones(1, 1) for name in further}
    save_file(load_file(path) | further | scales, path)
    loaded, expected = load(ours), load(plain)
    its = run(loaded, changed(loaded.config), PROMPTS)
    assert its.outputs == run(expected, changed(expected.config), PROMPTS).outputs
