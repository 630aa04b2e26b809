"""Blocks of models with recurrent states."""

from __future__ import annotations

from pathlib import Path

from tests.deploy.config.model_folder import write_model

from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.config.rules import kv_spec

SMALL_LFM = {
    "architectures": ["Lfm2ForCausalLM"],
    "layer_types": ["conv", "full_attention"],
    "num_hidden_layers": 2,
}


def test_states_have_separate_blocks(tmp_path: Path) -> None:
    facts = read_facts(write_model(tmp_path, **SMALL_LFM))
    kv = kv_spec(Options(model=str(tmp_path)), "cpu", facts, 2)
    assert [(group.kind, group.layers) for group in kv.groups] == [("full", [1]), ("state", [0])]
    assert kv_spec(Options(model=str(tmp_path), block_size=32), "cpu", facts, 2).block_size == 32


def test_block_size_matches_state_size(tmp_path: Path) -> None:
    facts = read_facts(write_model(tmp_path, **SMALL_LFM, conv_L_cache=16, hidden_size=4096, head_dim=16))
    need, state = facts.kv_needs[1], facts.state_needs[0]
    assert need is not None and state is not None
    kv = kv_spec(Options(model=str(tmp_path)), "cpu", facts, 2)
    token_bytes = 2 * need.num_kv_heads * need.key_dim * 2
    assert kv.block_size > 16
    assert kv.block_size * token_bytes <= state.num_bytes(2) < (kv.block_size + 16) * token_bytes


def test_gpu_has_the_same_blocks(tmp_path: Path) -> None:
    """KV of one byte a number too: a block then holds more tokens."""
    facts = read_facts(write_model(tmp_path, **SMALL_LFM, conv_L_cache=16, hidden_size=4096, head_dim=16))
    kv = kv_spec(Options(model=str(tmp_path)), "cuda", facts, 2)
    assert kv == kv_spec(Options(model=str(tmp_path)), "cpu", facts, 2)
    one_byte = kv_spec(Options(model=str(tmp_path), kv_cache_dtype="fp8"), "cuda", facts, 2)
    assert one_byte.layer_bytes == kv.layer_bytes
    assert one_byte.block_size // 2 == kv.block_size
