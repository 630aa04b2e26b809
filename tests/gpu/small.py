"""Small models for GPU tests: shapes that our kernels take, random weights, and an engine.

Configs and prompts are the same on every device. The CPU uses smaller ones, to debug the tests only.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Literal

import msgspec
from bench.gpu.engine import InProcessEngine, run_idle_tasks
from tests.models.conftest import engine_config

from quintet.executor.backends.registry import make_worker
from quintet.executor.interface import StepWorker
from quintet.wire.config import EngineConfig
from quintet.wire.params import SamplingParams

Dtype = Literal["float32", "bfloat16", "float16"]
BLOCK_SIZE = 16
MAX_LEN = 512

HF_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4104,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SMALLER = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "vocab_size": 264,
}

LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 127, 128, 129, 200, 257)
"""Around the edges of blocks (16) and of tiles (64, 128)."""


def dummy_config(
    folder: Path, device_name: str, *, dtype: Dtype = "bfloat16", **executor: Any
) -> EngineConfig:
    """Write a config into ``folder`` and return a configuration with random weights for 64 requests at once."""
    hf_config = HF_CONFIG if device_name == "cuda" else HF_CONFIG | SMALLER
    (folder / "config.json").write_text(json.dumps(hf_config))
    config = engine_config(
        folder,
        hf_config,
        BLOCK_SIZE,
        MAX_LEN,
        dtype,
        load_format="dummy",
        seed=3,
        device=device_name,
        **executor,
    )
    return with_scheduler(with_blocks(config, 1200), max_num_seqs=64, max_num_batched_tokens=4096)


def with_scheduler(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Return the configuration with other scheduler settings."""
    return msgspec.structs.replace(config, scheduler=msgspec.structs.replace(config.scheduler, **changes))


def with_executor(config: EngineConfig, **changes: Any) -> EngineConfig:
    """Return the configuration with other executor settings."""
    return msgspec.structs.replace(config, executor=msgspec.structs.replace(config.executor, **changes))


def with_blocks(config: EngineConfig, num_blocks: int, **changes: Any) -> EngineConfig:
    """Return the configuration with this number of KV blocks and no prefix cache: every token is computed."""
    changes = {
        "memory_bytes": num_blocks * config.model.kv.bytes_per_block,
        "enable_prefix_caching": False,
        **changes,
    }
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, **changes))


def prompts(num: int, vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Return prompts of lengths that cycle through `LENGTHS`."""
    draw = random.Random(seed)
    return [[draw.randrange(vocab_size) for _ in range(LENGTHS[i % len(LENGTHS)])] for i in range(num)]


def params(number: int, max_tokens: int, logprobs: int | None = None) -> SamplingParams:
    """Return greedy settings for every second request, and seeded draws for the others."""
    if number % 2:
        return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    return SamplingParams(
        temperature=1.0,
        top_p=0.95,
        top_k=40,
        seed=number,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=logprobs,
    )


def ready_worker(config: EngineConfig) -> StepWorker:
    """Return a worker after its whole boot, including graph capture."""
    worker: StepWorker = make_worker(config)
    run_idle_tasks(worker)
    return worker


def run_all(
    config: EngineConfig, worker: StepWorker, requests: dict[int, tuple[list[int], SamplingParams]]
) -> InProcessEngine:
    """Submit all requests at once; return the engine after the last one has ended."""
    engine = InProcessEngine(config, worker)
    for number, (prompt, settings) in requests.items():
        engine.admit(number, prompt, settings)
    engine.run()
    return engine
