"""Small resolved configuration for tests of the frontend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from quintet.process.work_journal import ENTRY, WorkId
from quintet.wire.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    FrontendConfig,
    KvPeersConfig,
    ModelConfig,
    ParsersConfig,
    ProcessesConfig,
    SchedulerConfig,
    SpeculativeConfig,
)
from quintet.wire.ids import WorkerId
from quintet.wire.kv_spec import full_layers
from quintet.wire.model_files import AdapterConfig
from quintet.wire.pooling import PoolingConfig

Policy = Literal["fcfs", "priority"]


def make_config(
    run_dir: str = "/nowhere",
    heartbeat_s: float = 1.0,
    policy: Policy = "fcfs",
    resume_grace_s: float = 30.0,
    parsers: ParsersConfig | None = None,
    peers: KvPeersConfig | None = None,
    speculative: SpeculativeConfig | None = None,
    pooling: PoolingConfig | None = None,
    adapters: Sequence[AdapterConfig] = (),
    **frontend: Any,
) -> EngineConfig:
    """Return a toy model's configuration with the given frontend settings."""
    return EngineConfig(
        run_dir=run_dir,
        model=ModelConfig(
            path="/models/toy",
            tokenizer_path="/models/toy",
            served_names=["toy", "toy-alias"],
            architecture="LlamaForCausalLM",
            dtype="float32",
            vocab_size=1000,
            max_model_len=256,
            eos_token_ids=[2],
            kv=full_layers(1, 1, 8, 4, 16),
            chat_templates={"default": "{{ messages }}", "tool_use": "{{ tools }}"},
            parsers=parsers or ParsersConfig(),
            pooling=pooling,
            adapters=[*adapters],
        ),
        cache=CacheConfig(memory_bytes=1 << 20, peers=peers),
        scheduler=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=256,
            policy=policy,
            resume_grace_s=resume_grace_s,
            speculative=speculative,
        ),
        executor=ExecutorConfig(kind="mock"),
        frontend=FrontendConfig(**frontend),
        processes=ProcessesConfig(heartbeat_s=heartbeat_s),
    )


def leave_work(run_dir: Path, worker: WorkerId, *work: WorkId) -> None:
    """Write the journal of a process that died during this work."""
    (run_dir / f"{worker}.work").write_bytes(b"".join(ENTRY.pack(*each) for each in work))
