"""Executes plans with a real model: tables, forward pass, sampling. Knows nothing of sockets.

The device's order is the plans' order, so a plan may rely on everything its predecessors wrote, tokens included.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from quintet.executor.audit import check_tables
from quintet.executor.batch import BatchBuilder, KvShape, Rows
from quintet.executor.memory import lazy_zeros, to_device
from quintet.executor.models.model import CausalModel, Setting
from quintet.executor.models.registry import build_model, read_card
from quintet.executor.ops.table import Ops, ops_of
from quintet.executor.platforms.platform import Platform, open_platform
from quintet.executor.quant.registry import open_quantization
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import SlotTables
from quintet.executor.weights.load import fill_randomly, load_checkpoint
from quintet.wire.config import EngineConfig, ModelConfig
from quintet.wire.errors import ConfigError
from quintet.wire.step import StepPlan, StepResult

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TIED_OUTPUT = frozenset({"lm_head.weight"})
"""Checkpoints of tied models may repeat the embedding under this name."""


class Worker:
    """A loaded model with its KV memory, its slot tables and its sampler."""

    def __init__(
        self,
        model: CausalModel,
        ops: Ops,
        device: torch.device,
        config: EngineConfig,
        facts: Mapping[str, str],
    ) -> None:
        kv, max_num_seqs = config.model.kv, config.scheduler.max_num_seqs
        self.num_blocks = kv.num_blocks(config.cache.memory_bytes)
        if self.num_blocks < 1:
            raise ConfigError(
                f"KV memory of {config.cache.memory_bytes} bytes holds no block of {kv.bytes_per_block};"
                " raise --kv-cache-memory"
            )
        self.facts = {**facts, "blocks": str(self.num_blocks)}
        dtype = DTYPES[config.model.dtype]
        shape = (2, self.num_blocks, kv.num_kv_heads, kv.block_size, kv.head_dim)
        self._kv = [lazy_zeros(shape, dtype, device) for _ in range(kv.num_layers)]
        self._model = model
        self._tables = SlotTables(max_num_seqs, config.model.max_model_len, kv.block_size, device)
        self._sampler = Sampler(max_num_seqs, model.vocab_size, self._tables, ops)
        element_bytes = torch.empty((), dtype=dtype).element_size()
        self._builder = BatchBuilder(
            KvShape(kv.num_kv_heads, kv.block_size, 2 * kv.num_kv_heads * kv.head_dim * element_bytes),
            model.windows,
            model.num_heads,
            model.needs_lengths,
            dtype,
            ops.reads_pages_in_place(dtype, model.num_heads, kv.num_kv_heads, kv.head_dim),
        )

    def reset(self) -> None:
        """Empty every table."""
        self._tables.reset()

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's deltas, then its block copies, then compute its rows and draw."""
        self._tables.apply(plan)
        check_tables(plan, self._tables)
        for row in plan.new_rows:
            self._sampler.admit(row)
        if plan.copies:
            self._copy_blocks(plan.copies)
        result = StepResult(plan.step, 0, b"")
        if not plan.slots:
            return result
        rows = Rows.of(plan)
        hidden = self._model.forward(self._builder.build(rows, self._tables), self._kv)
        result.prompt_logprobs = self._sampler.prompt_logprobs(rows, hidden, self._model)
        if len(rows.sampling):
            last = rows.offsets[rows.sampling] + rows.counts[rows.sampling] - 1
            if len(last) < len(hidden):
                hidden = hidden[to_device(last, self._tables.device)]
            drawn, result.logprobs = self._sampler.draw(rows, self._model.logits(hidden))
            result.token_ids = drawn.to(torch.int32).cpu().numpy().tobytes()
        return result

    def _copy_blocks(self, copies: bytes) -> None:
        pairs = np.frombuffer(copies, np.int32).reshape(-1, 2).astype(np.int64)
        sources = to_device(pairs[:, 0].copy(), self._tables.device)
        targets = to_device(pairs[:, 1].copy(), self._tables.device)
        for cache in self._kv:
            cache[:, targets] = cache[:, sources]


def make_worker(config: EngineConfig) -> Worker:
    """Open the device, build and load the model, reserve KV memory."""
    begun = time.monotonic()
    platform = open_platform(config.executor)
    ops = ops_of(platform.name)
    model = load_model(config, platform, ops)
    facts = {
        "worker": f"{config.model.architecture} in {config.model.dtype} on {platform.description}",
        "weights": f"{model.weights.num_bytes / 1e6:.1f} MB in {time.monotonic() - begun:.1f} s",
    }
    return Worker(model, ops, platform.device, config, facts)


def load_model(config: EngineConfig, platform: Platform, ops: Ops) -> CausalModel:
    """Return the configured model with its weights."""
    folder = Path(config.model.path)
    card = read_card(folder)
    model = build_model(
        config.model.architecture,
        card,
        Setting(ops, platform.device, DTYPES[config.model.dtype], open_quantization("none")),
    )
    check_agreement(model, config.model, card.path)
    with torch.inference_mode():
        if config.executor.load_format == "dummy":
            fill_randomly(model.weights, config.executor.seed)
        else:
            load_checkpoint(model.weights, folder, TIED_OUTPUT)
        model.weights.release()
    return model


def check_agreement(model: CausalModel, resolved: ModelConfig, path: str) -> None:
    """Reject a resolved configuration that counts KV memory for another model than the card describes."""
    kv = resolved.kv
    for name, ours, theirs in (
        ("layers", len(model.windows), kv.num_layers),
        ("KV heads", model.num_kv_heads, kv.num_kv_heads),
        ("numbers per head", model.head_dim, kv.head_dim),
        ("tokens in the vocabulary", model.vocab_size, resolved.vocab_size),
    ):
        if ours != theirs:
            raise ConfigError(f"{path}: describes {ours} {name}, but the resolved configuration has {theirs}")
