"""The logits of a request have the same bits in any batch and schedule.

The real core plans and the compiled step computes. Every row of logits that draws a token is compared bit by bit. The
reference is the request alone, in one chunk, on one thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
import pytest
import torch
import transformers
from tests.models.conftest import engine_config
from tests.models.test_engine import CoreAndWorker, changed, without_prefix_cache

from quintet.executor.backends.cpu.ops.host_library import open_library, set_threads
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.registry import make_worker
from quintet.executor.interface import Finished
from quintet.executor.ragged import Int
from quintet.executor.sampling.grammar import StepMasks
from quintet.executor.sampling.settings import Settings
from quintet.executor.slots import Rows, SlotTables
from quintet.executor.worker import Worker
from quintet.wire.config import EngineConfig, KvFormat
from quintet.wire.params import SamplingParams
from quintet.wire.step import StepPlan

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, seed=0)
RANDOM = SamplingParams(temperature=1.1, top_p=0.9, top_k=40, max_tokens=NUM_TOKENS, seed=11)
LENGTHS = (1, 2, 15, 16, 17, 40, 63, 64, 65, 127, 128, 129, 200, 257)
"""Around the edges of blocks (16), of key chunks (64, 128) and of row tiles."""

Dtype = Literal["float32", "bfloat16", "float16"]


class LogitRecorder:
    """A worker that records the logits of every drawn token: (request, position) to bytes."""

    def __init__(self, worker: Worker) -> None:
        self.inner = worker
        self.num_blocks = worker.num_blocks
        self.num_host_blocks = worker.num_host_blocks
        self.kv = None
        self.seen: dict[tuple[int, int], bytes] = {}
        self._tenants: dict[int, int] = {}
        self._rows: Rows | None = None
        self._runner = worker.runner
        worker.runner = self
        self.max_outputs = self._runner.max_outputs

    def reset(self) -> None:
        self.inner.reset()

    def begin(self, plan: StepPlan) -> Finished:
        self._tenants |= {row.slot: row.request_id for row in plan.new_rows}
        return self.inner.begin(plan)

    def forward(self, rows: Rows, tables: SlotTables) -> None:
        self._rows = rows
        self._runner.forward(rows, tables)

    def forward_and_draw(
        self, rows: Rows, tables: SlotTables, settings: Settings, masks: StepMasks | None
    ) -> bytes | None:
        tokens = self._runner.forward_and_draw(rows, tables, settings, masks)
        if tokens:
            self._rows = rows
            self.logits(
                (rows.offsets + rows.counts - 1)[rows.sampling]
            )  # computed a second time, to compare the bits
        return tokens

    def logits(self, tokens: Int) -> torch.Tensor:
        logits = self._runner.logits(tokens)
        rows = self._rows
        assert rows is not None and len(rows.sampling) == len(tokens)
        for i, row in enumerate(rows.sampling.tolist()):
            key = (self._tenants[int(rows.slots[row])], int(rows.starts[row] + rows.counts[row]))
            bits = logits[i].view(torch.uint8).numpy().tobytes()
            assert self.seen.setdefault(key, bits) == bits, (
                f"request and position {key} computed twice, differently"
            )
        return logits

    def release(self) -> dict[tuple[int, int], bytes]:
        self.inner.runner = self._runner
        return self.seen


def hf_config_of(config: transformers.PretrainedConfig, folder: Path) -> dict[str, Any]:
    config.architectures = [
        {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "mistral": "MistralForCausalLM"}[
            config.model_type
        ]
    ]
    config.save_pretrained(folder)
    hf_config: dict[str, Any] = json.loads((folder / "config.json").read_bytes())
    return hf_config


MODELS: dict[str, transformers.PretrainedConfig] = {
    "grouped heads, biases": transformers.Qwen2Config(
        vocab_size=331, hidden_size=96, intermediate_size=200, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
    ),
    "head norms": transformers.Qwen3Config(
        vocab_size=257, hidden_size=64, intermediate_size=130, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, max_position_embeddings=512,
    ),
    "sliding window": transformers.MistralConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=1, max_position_embeddings=512, sliding_window=50,
    ),
}  # fmt: skip


@pytest.fixture
def threads() -> Iterator[None]:
    """Reset the thread pool to one thread."""
    yield
    library = open_library()
    assert library is not None
    set_threads(library, 1, False)


def prompts_of(vocab_size: int) -> list[list[int]]:
    numbers = np.random.default_rng(5)
    return [numbers.integers(0, vocab_size, length).tolist() for length in LENGTHS]


def run(
    config: EngineConfig,
    worker: Worker,
    prompts: dict[int, list[int]],
    params: SamplingParams,
    rounds: int = 1,
) -> dict[tuple[int, int], bytes]:
    """Compute all prompts together, ``rounds`` times over; return the logits after every token."""
    witness = LogitRecorder(worker)
    engine = CoreAndWorker(config, witness)  # type: ignore[arg-type]
    for round_ in range(rounds):
        for request_id, prompt in prompts.items():
            engine.admit(request_id + 1000 * round_, prompt, params)
        engine.run()
    return witness.release()


def with_kv(config: EngineConfig, dtype: KvFormat) -> EngineConfig:
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, dtype=dtype))


def with_blocks(config: EngineConfig, num_blocks: int) -> EngineConfig:
    cache = msgspec.structs.replace(config.cache, memory_bytes=num_blocks * config.model.kv.bytes_per_block)
    return msgspec.structs.replace(config, cache=cache)


@pytest.mark.parametrize(
    ("dtype", "kv"),
    [
        ("bfloat16", "model"),
        ("float32", "model"),
        ("float16", "model"),
        ("bfloat16", "int4"),
        ("bfloat16", "fp8"),
    ],
)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("params", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_logits_do_not_depend_on_batch_or_schedule(
    model: str, dtype: Dtype, kv: KvFormat, params: SamplingParams, tmp_path: Path, threads: None
) -> None:
    hf_config = hf_config_of(MODELS[model], tmp_path)
    config = engine_config(tmp_path, hf_config, 16, 288, dtype, load_format="dummy", seed=3)
    config = with_kv(changed(config, max_num_seqs=64), kv)
    worker = make_worker(config)
    assert isinstance(worker.runner, ProgramRunner)
    library = open_library()
    assert library is not None
    prompts = dict(enumerate(prompts_of(hf_config["vocab_size"]), start=1))
    alone: dict[tuple[int, int], bytes] = {}
    for request_id, prompt in prompts.items():
        alone |= run(without_prefix_cache(changed(config)), worker, {request_id: prompt}, params)
    assert len(alone) == NUM_TOKENS * len(prompts)

    everyone = changed(config)
    many = {100 * copy + request_id: prompt for copy in range(4) for request_id, prompt in prompts.items()}
    variants: dict[str, tuple[EngineConfig, dict[int, list[int]], int, int]] = {
        "together": (everyone, prompts, 1, 1),
        "together on two threads": (everyone, prompts, 1, 2),
        "56 at once on two threads": (everyone, many, 1, 2),
        "chunks of 7": (
            changed(config, max_num_batched_tokens=32, long_prefill_token_threshold=7),
            prompts,
            1,
            1,
        ),
        "chunks of up to 37": (changed(config, max_num_batched_tokens=37), prompts, 1, 2),
        "prefix hits": (everyone, prompts, 2, 1),
        "preemption": (with_blocks(changed(config), 40), prompts, 1, 1),
    }
    for name, (variant, admitted, rounds, num_threads) in variants.items():
        set_threads(library, num_threads, False)
        seen = run(variant, worker, admitted, params, rounds)
        for (request_id, position), bits in seen.items():
            assert bits == alone[request_id % 1000 % 100, position], (name, request_id, position)
        assert len(seen) == NUM_TOKENS * len(admitted) * rounds, name
