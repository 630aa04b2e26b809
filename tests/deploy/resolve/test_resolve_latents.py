"""Models with latent attention (MLA): a latent is stored once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.deploy.config.model_folder import write_model

from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import read_facts
from quintet.deploy.config.rules import kv_spec
from quintet.wire.errors import ConfigError

LATENTS = {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "qk_rope_head_dim": 64}


def test_int4_latents_are_rejected(tmp_path: Path) -> None:
    facts = read_facts(write_model(tmp_path, **LATENTS))
    with pytest.raises(
        ConfigError, match=r"--kv-cache-dtype int4 is not supported for latent attention.*set int8"
    ):
        kv_spec(Options(model=str(tmp_path), kv_cache_dtype="int4"), "cpu", facts, 2)


@pytest.mark.parametrize(
    ("device", "cached_as", "token_bytes"),
    [
        ("cpu", "auto", 2 * 576),
        ("cpu", "int8", 576 + 4),
        ("cuda", "auto", 2 * 576),
        ("cuda", "fp8", 576),
    ],
)
def test_latent_is_stored_once(tmp_path: Path, device: str, cached_as: str, token_bytes: int) -> None:
    facts = read_facts(write_model(tmp_path, **LATENTS))
    kv = kv_spec(Options(model=str(tmp_path), kv_cache_dtype=cached_as), device, facts, 2)
    assert kv.bytes_per_token == 2 * token_bytes  # two layers
