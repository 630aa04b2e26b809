"""Row ``memory`` of docs/gpu.md: a step for which the device's memory does not suffice is computed in parts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from tests.gpu.small import dummy_config, params, prompts, ready_worker, run_all, with_scheduler

from quintet.wire.config import EngineConfig
from quintet.wire.kv_spec import KvGroup

WIDE = {"hidden_size": 512, "intermediate_size": 16384, "num_hidden_layers": 2}
"""Working memory is 64 KiB a token in each half of the widest layer: a step of 4,096 tokens needs 256 MiB."""
LEFT_BYTES = 96 << 20
BUDGET = 4096


@pytest.fixture
def limit(device_name: str) -> Iterator[None]:
    """Undo the limit that the test sets."""
    if device_name == "cpu":
        pytest.skip("torch limits no memory of a CPU")
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def test_oom_step_is_split(tmp_path: Path, device_name: str, limit: None) -> None:
    # The products of our kernels do not depend on the number of tokens in a step; those of cuBLAS may.
    config = with_scheduler(
        dummy_config(tmp_path, device_name, batch_invariant=True), max_num_batched_tokens=BUDGET
    )
    hf_config = json.loads((tmp_path / "config.json").read_text()) | WIDE
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    config = with_layers(config, 2)
    worker = ready_worker(config)
    requested = {number: (prompt, params(number, 8)) for number, prompt in enumerate(prompts(60, 200), 1)}
    enough = run_all(config, worker, requested).outputs
    assert worker.num_split == 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + LEFT_BYTES) / total)
    assert run_all(config, worker, requested).outputs == enough
    assert worker.num_split > 0


def with_layers(config: EngineConfig, num_layers: int) -> EngineConfig:
    """Return the configuration with the model reduced to this number of layers."""
    group = KvGroup("full", list(range(num_layers)))
    kv = msgspec.structs.replace(config.model.kv, groups=[group], layers_per_block=num_layers)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, kv=kv))
