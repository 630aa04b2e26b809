"""``--enable-eplb`` and ``--eplb-config``: valid values and their memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.deploy.config.model_folder import write_model

from quintet.deploy.config.build import resolve
from quintet.deploy.config.flags import Options
from quintet.wire.config import EngineConfig, EplbConfig
from quintet.wire.errors import ConfigError


def config_of(folder: Path, eplb: str | None, **flags: Any) -> EngineConfig:
    """Resolve a model of six experts over two ranks. eplb: value of ``--eplb-config``."""
    write_model(folder, architectures=["MixtralForCausalLM"], num_local_experts=6, num_experts_per_tok=2)
    given = {"enable_eplb": True, "enable_expert_parallel": True, "tensor_parallel_size": 2} | flags
    options = Options(model=str(folder), load_format="dummy", device="cpu", eplb_config=eplb, **given)
    return resolve(options, folder).config


def test_eplb_is_resolved_and_its_memory_is_counted(tmp_path: Path) -> None:
    config = config_of(tmp_path, '{"window_size": 50, "step_interval": 20, "num_redundant_experts": 4}')
    assert config.executor.eplb == EplbConfig(50, 20, 4)
    plain = config_of(tmp_path, None, enable_eplb=False)
    assert plain.executor.eplb is None
    assert config.executor.shared_bytes - plain.executor.shared_bytes == 4 << 20
    of_vllm = '{"window_size":1000,"step_interval":3000,"num_redundant_experts":2,"log_balancedness":true,"use_async":false}'
    assert config_of(tmp_path, of_vllm).executor.eplb == EplbConfig(1000, 3000, 2)
    more = '{"num_redundant_experts": 2, "log_balancedness_interval": 8, "policy": "default", "communicator": "nixl"}'
    assert config_of(tmp_path, more).executor.eplb == EplbConfig(1000, 3000, 2)


@pytest.mark.parametrize(
    ("eplb", "flags", "words"),
    [
        ('{"num_redundant_experts": 2}', {"enable_eplb": False}, "--eplb-config requires --enable-eplb"),
        (
            '{"num_redundant_experts": 2}',
            {"enable_expert_parallel": False},
            "requires --enable-expert-parallel: add it",
        ),
        (
            None,
            {},
            "num_redundant_experts is 0; .* multiple of the 2 ranks, such as --eplb-config '{",
        ),
        ('{"num_redundant_experts": 3}', {}, "num_redundant_experts is 3; .* multiple of the 2 ranks"),
        ('{"num_redundant_experts": 8}', {}, "is 8; with 2 ranks and 6 experts it must be at most 6"),
        (
            '{"num_redundant_experts": 2, "window_size": 0}',
            {},
            "window_size is 0; it must be a positive number of steps",
        ),
        (
            '{"num_redundant_experts": 2, "step_interval": -1}',
            {},
            "step_interval is -1; it must be a positive number",
        ),
        ('{"redundant": 2}', {}, "unknown field `redundant`; write JSON such as"),
        ("8", {}, "write JSON such as"),
    ],
)
def test_invalid_flags_are_rejected(
    eplb: str | None, flags: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        config_of(tmp_path, eplb, **flags)
