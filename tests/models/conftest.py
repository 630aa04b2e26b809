"""Tiny random checkpoints, and a small core that drives a `Worker` directly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
import torch
import transformers
from tests.models.random_checkpoints import batched_logits, greedy

from quintet.deploy.config import rules
from quintet.deploy.config.flags import Options
from quintet.deploy.config.model.hf_config import read_facts
from quintet.executor.backends.registry import make_worker
from quintet.executor.worker import Worker
from quintet.wire.codec import pack_i32, pack_u8, unpack_i32
from quintet.wire.config import (
    CacheConfig,
    EngineConfig,
    ExecutorConfig,
    FrontendConfig,
    ModelConfig,
    ProcessesConfig,
    SchedulerConfig,
)
from quintet.wire.kv_spec import full_layers
from quintet.wire.params import SamplingParams
from quintet.wire.step import NewRow, StepPlan, StepResult

GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
MAX_SEQS = 16
MAX_TOKENS = 256
"""Per step: all prompts of most tests together. A device worker computes such a step at boot."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Leave the other core to concurrent tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass
class Request:
    """The small core's state of one request."""

    slot: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    params: SamplingParams
    seed: int
    stop_ids: list[int] = field(default_factory=list)
    bad_word_ids: list[list[int]] = field(default_factory=list)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    is_new: bool = True

    @property
    def outputs(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def done(self) -> bool:
        return len(self.outputs) >= self.max_tokens


class SmallCore:
    """Plans steps by hand: FCFS, with a token budget; keeps every result."""

    def __init__(self, worker: Worker, block_size: int) -> None:
        self.worker = worker
        self.block_size = block_size
        self.free_slots = list(range(MAX_SEQS))[::-1]
        self.free_blocks = list(range(1, worker.num_blocks))[::-1]
        self.running: list[Request] = []
        self.freed: list[int] = []
        self.step = 0
        self.results: list[tuple[list[Request], StepResult]] = []

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 32,
        params: SamplingParams = GREEDY,
        seed: int = 0,
        num_prompt: int | None = None,
        **row: Any,
    ) -> Request:
        """Admit a request; ``prompt`` may end with existing outputs (``num_prompt`` is their start)."""
        request = Request(
            self.free_slots.pop(), list(prompt), num_prompt or len(prompt), max_tokens, params, seed, **row
        )
        self.running.append(request)
        return request

    def fork(self, parent: Request, **changes: Any) -> Request:
        """Admit a request that shares the parent's computed prompt: full blocks by reference, the last by copy."""
        child = self.add(parent.tokens[: parent.num_prompt], **changes)
        child.computed = parent.num_prompt - 1
        whole, part = divmod(child.computed, self.block_size)
        child.blocks = parent.blocks[:whole]
        if part:
            child.blocks.append(self.free_blocks.pop())
            child.copies.append((parent.blocks[whole], child.blocks[whole]))
        return child

    def finish(self, request: Request) -> None:
        """Free the slot and the blocks."""
        self.running.remove(request)
        self.freed.append(request.slot)
        self.free_slots.insert(0, request.slot)
        self.free_blocks += request.blocks

    def advance(self, chunk: int = 1 << 20, budget: int = 1 << 20) -> StepResult:
        """Plan and execute one step; ``chunk`` limits a row, ``budget`` the step."""
        rows: list[tuple[Request, int]] = []
        new_rows, blocks, copies = [], [], []
        for request in self.running:
            count = min(len(request.tokens) - request.computed, chunk, budget)
            if count <= 0:
                continue
            budget -= count
            known = 0 if request.is_new else len(request.blocks)
            while len(request.blocks) * self.block_size < request.computed + count:
                request.blocks.append(self.free_blocks.pop())
            if request.is_new:
                new_rows.append(self._new_row(request))
                request.is_new = False
            blocks += [(request.slot, 0, at, request.blocks[at]) for at in range(known, len(request.blocks))]
            copies += request.copies
            request.copies = []
            rows.append((request, count))
        self.step += 1
        ends = [request.computed + count == len(request.tokens) for request, count in rows]
        plan = StepPlan(
            step=self.step,
            sent_ns=0,
            freed=pack_i32(self.freed),
            new_rows=new_rows,
            blocks=pack_i32([value for entry in blocks for value in entry]),
            copies=pack_i32([value for pair in copies for value in pair]),
            slots=pack_i32([request.slot for request, _ in rows]),
            starts=pack_i32([request.computed for request, _ in rows]),
            counts=pack_i32([count for _, count in rows]),
            samples=pack_u8(ends),
        )
        self.freed = []
        result = self.worker.execute(plan)
        self.results.append(([request for request, _ in rows], result))
        tokens = iter(unpack_i32(result.token_ids))
        for (request, count), ended in zip(rows, ends, strict=True):
            request.computed += count
            if ended:
                request.tokens.append(next(tokens))
        for request in [request for request, _ in rows if request.done]:
            self.finish(request)
        return result

    def run(self, chunk: int = 1 << 20, budget: int = 1 << 20) -> None:
        """Step until every request is done."""
        while self.running:
            self.advance(chunk, budget)

    def _new_row(self, request: Request) -> NewRow:
        return NewRow(
            slot=request.slot,
            generation=self.step,
            request_id=id(request),
            token_ids=pack_i32(request.tokens),
            num_prompt_tokens=request.num_prompt,
            params=request.params,
            seed=request.seed,
            stop_ids=request.stop_ids,
            bad_word_ids=request.bad_word_ids,
        )


@dataclass
class Served:
    """A checkpoint, its transformers model, and a core over a worker that loaded it."""

    reference: Any
    core: SmallCore
    config: EngineConfig

    def greedy(self, prompts: Sequence[list[int]], num_tokens: int = 32) -> list[list[int]]:
        """Return the greedy tokens of transformers for each prompt."""
        return greedy(batched_logits(self.reference), prompts, num_tokens)


def engine_config(
    folder: Path,
    hf_config: dict[str, Any],
    block_size: int,
    max_model_len: int,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    **executor: Any,
) -> EngineConfig:
    """Resolve a configuration for a tiny model, as ``deploy`` would for layers without a window."""
    heads = hf_config["num_attention_heads"]
    kv = full_layers(
        num_layers=hf_config["num_hidden_layers"],
        num_kv_heads=hf_config.get("num_key_value_heads") or heads,
        head_dim=hf_config.get("head_dim") or hf_config["hidden_size"] // heads,
        dtype_bytes=4 if dtype == "float32" else 2,
        block_size=block_size,
    )
    return EngineConfig(
        run_dir="",
        model=ModelConfig(
            path=str(folder),
            tokenizer_path=str(folder),
            served_names=["tiny"],
            architecture=hf_config["architectures"][0],
            hf_config=json.dumps(hf_config),
            dtype=dtype,
            vocab_size=hf_config["vocab_size"],
            max_model_len=max_model_len,
            eos_token_ids=[],
            kv=kv,
        ),
        cache=CacheConfig(memory_bytes=kv.bytes_per_block * 512),
        scheduler=SchedulerConfig(max_num_seqs=MAX_SEQS, max_num_batched_tokens=MAX_TOKENS),
        executor=ExecutorConfig(threads=1, **executor),
        frontend=FrontendConfig(),
        processes=ProcessesConfig(),
    )


def in_groups(config: EngineConfig) -> EngineConfig:
    """Return the configuration with its layers in groups, as ``deploy`` has them."""
    model = config.model
    options = Options(model=model.path, block_size=model.kv.block_size)
    facts = read_facts(Path(model.path))
    kv = rules.kv_spec(options, "cpu", facts, 4 if model.dtype == "float32" else 2)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(model, kv=kv))


@pytest.fixture(params=[4, 16], ids=["eager", "compiled"])
def serve(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Served]:
    """Return a function that saves and loads a tiny random model of a transformers configuration.

    Blocks of 4 tokens are computed by torch; blocks of 16 by the compiled step.
    """
    block_size: int = request.param

    def serve(config: transformers.PretrainedConfig, max_model_len: int = 256, **save: Any) -> Served:
        torch.manual_seed(1)
        reference = transformers.AutoModelForCausalLM.from_config(config).float().eval()
        with torch.no_grad():
            for parameter in reference.parameters():  # far from uniform, biases and norms too
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                else:
                    parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
        reference.save_pretrained(tmp_path, **save)
        import json

        hf_config = json.loads((tmp_path / "config.json").read_bytes())
        resolved = engine_config(tmp_path, hf_config, block_size, max_model_len)
        return Served(reference, SmallCore(make_worker(resolved), block_size), resolved)

    return serve
