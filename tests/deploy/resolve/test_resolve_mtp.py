"""The method ``mtp``: memory of the prediction layer, and rejections of models without one, by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.model_folder import write_model, write_weights
from tests.deploy.resolve.test_resolve_draft_model import config_of, speculative_of

from quintet.wire.config import DraftModelConfig
from quintet.wire.errors import ConfigError

FLAG = '{"method": "mtp", "num_speculative_tokens": 4}'
MIMO = {"architectures": ["MiMoForCausalLM"], "num_key_value_heads": 2}
QWEN = {"architectures": ["Qwen3NextForCausalLM"], "num_hidden_layers": 4, "head_dim": 32}
LAYER = "model.mtp_layers.0"


def draft_of(folder: Path, **options: Any) -> DraftModelConfig:
    found = speculative_of(config_of(folder, **{"speculative_config": FLAG, **options})).draft
    assert found is not None
    return found


def test_layer_reads_the_last_hidden_states(tmp_path: Path) -> None:
    write_model(tmp_path / "target", **MIMO)
    config = config_of(tmp_path, speculative_config=FLAG, dtype="float32")
    found = speculative_of(config).draft
    assert found is not None and speculative_of(config).method == "mtp"
    assert (found.aux_layers, found.model.vocab_size, found.model.dtype) == ([2], 100, "float32")
    assert found.model.path == config.model.path
    kv, features = 2 * 2 * 16 * 4 * 16, 16 * 64 * 4
    assert found.model.kv.bytes_per_block == kv and config.model.kv.draft_bytes == kv + features


def test_several_layers_have_keys_values_and_features_each(tmp_path: Path) -> None:
    write_model(tmp_path / "target", **MIMO, num_nextn_predict_layers=3)
    config = config_of(tmp_path, speculative_config=FLAG, dtype="float32")
    found = speculative_of(config).draft
    kv, features = 2 * 2 * 16 * 4 * 16, 64 * 4
    assert found is not None and found.model.kv.bytes_per_block == 3 * kv
    assert config.model.kv.draft_bytes == 3 * kv + (16 + 2) * features


def test_only_layers_that_are_used_and_found_are_read(tmp_path: Path) -> None:
    write_model(tmp_path / "target", **MIMO, num_mtp_layers=3)
    (group,) = draft_of(tmp_path, speculative_config=FLAG.replace("4", "2")).model.kv.groups
    assert group.layers == [0, 1]
    write_weights(tmp_path / "target" / "model.safetensors", {f"{LAYER}.input_proj.weight": [64, 128]})
    (group,) = draft_of(tmp_path, load_format="auto").model.kv.groups
    assert group.layers == [0]


def test_layer_of_a_model_with_states_has_blocks_of_its_attention(tmp_path: Path) -> None:
    write_model(tmp_path / "target", **QWEN)
    config = config_of(tmp_path, speculative_config=FLAG)
    found = speculative_of(config).draft
    assert found is not None and config.model.kv.groups[found.group].kind == "full"
    assert [(group.kind, group.layers) for group in found.model.kv.groups] == [("full", [0])]
    assert found.model.kv.block_size == config.model.kv.block_size


def test_tensors_of_the_layer_are_its_memory(tmp_path: Path) -> None:
    write_model(tmp_path / "target", **MIMO)
    before = draft_of(tmp_path, quantization="int8").weight_bytes
    tensors = {f"{LAYER}.input_proj.weight": [64, 128], f"{LAYER}.mlp.up_proj.weight": [1000, 64]}
    further = {"model.embed_tokens.weight": [100, 64], "model.layers.1.mlp.up_proj.weight": [128, 64]}
    write_weights(tmp_path / "target" / "model.safetensors", tensors | further)
    after = draft_of(tmp_path, load_format="auto").weight_bytes
    plain = draft_of(tmp_path).weight_bytes
    num_layer = 64 * 128 + 64 * 16 * (2 * 4 + 2 * 2) + 3 * 64 * 128
    assert after - plain == 2 * (64 * 128 + 1000 * 64 - num_layer) and before < plain


def test_rank_0_has_a_whole_output_layer_for_the_layer(tmp_path: Path) -> None:
    write_model(tmp_path / "target", **MIMO)
    alone = draft_of(tmp_path)
    for layout in ("tensor_parallel_size", "pipeline_parallel_size"):
        divided = draft_of(tmp_path, **{layout: 2})
        assert divided.weight_bytes - alone.weight_bytes == 100 * 64 * 2
        assert divided.model.kv == alone.model.kv


def test_experts_of_the_layer_have_a_layout_of_their_own(tmp_path: Path) -> None:
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    write_model(tmp_path / "target", **QWEN, **sizes, shared_expert_intermediate_size=8)
    experts = {"model.layers.0.mlp.experts.0.gate_proj.weight": [8, 64]}
    layer = {"mtp.fc.weight": [64, 128], "mtp.layers.0.mlp.experts.gate_up_proj": [4, 16, 64]}
    write_weights(tmp_path / "target" / "model.safetensors", experts | layer)
    config = config_of(tmp_path, speculative_config=FLAG, load_format="auto")
    found = speculative_of(config).draft
    assert found is not None and json.loads(found.model.hf_config)["stacked_experts"] is True
    assert not json.loads(config.model.hf_config).get("stacked_experts")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "mtp is not supported for LlamaForCausalLM, only for DeepseekV3ForCausalLM"),
        (
            {"architectures": ["ExaoneMoeForCausalLM"], "mtp_layer_types": ["sliding_attention"]},
            r"mtp_layer_types is \['sliding_attention'\]; it must be a list of full_attention",
        ),
        (MIMO, r"has no tensors model\.mtp_layers\.0\.input_proj\.\* of a multi-token prediction layer"),
    ],
)
def test_model_without_a_layer_is_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "target", **changes)
    write_weights(tmp_path / "target" / "model.safetensors", {"model.embed_tokens.weight": [100, 64]})
    with pytest.raises(ConfigError, match=message):
        config_of(tmp_path, speculative_config=FLAG, load_format="auto")
