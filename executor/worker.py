"""Execute plans with a real model: slot tables, forward pass, sampling. Contains no socket code.

Steps run on the device in plan order, so a plan may read everything that earlier plans wrote, including tokens.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import torch

from quintet.executor.backends.cpu.ops.host_dtypes import DTYPE_CODES, NARROW_KV
from quintet.executor.backends.cpu.ops.huge_memory import HugeMemory
from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.backends.cpu.program.kv import allocate_kv, takes_layer
from quintet.executor.backends.cpu.program.library import program_library
from quintet.executor.backends.cpu.program.runner import ProgramRunner
from quintet.executor.backends.cpu.program.stage import Stage
from quintet.executor.backends.platforms.platform import Platform, open_platform
from quintet.executor.backends.torch.eager import EagerRunner
from quintet.executor.batch import Rows
from quintet.executor.distributed.parallel.library import Note
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.distributed.parallel.whole_blocks import HostBlocksOfAllRanks, Moves, open_whole_blocks
from quintet.executor.interface import Finished, StepWorker
from quintet.executor.kv_transfer.block_bytes import BlockBytes, WholeBlocks
from quintet.executor.kv_transfer.host_blocks import HostBlocks
from quintet.executor.kv_transfer.tiers import KvTiers
from quintet.executor.loading import MODEL_DTYPES, load_model
from quintet.executor.memory import to_device
from quintet.executor.model_config.share import WHOLE, Share, share_of
from quintet.executor.models.model import CausalModel
from quintet.executor.oom_split import OomSplit
from quintet.executor.runner import Runner
from quintet.executor.sampling.grammar import Grammars, StepMasks
from quintet.executor.sampling.ops import SamplingOps, sampling_ops_of
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import SlotTables, TablesDiffer, check_tables
from quintet.process.trace import Span, no_span
from quintet.wire.config import EngineConfig
from quintet.wire.errors import ConfigError
from quintet.wire.step import StepPlan, StepResult

log = logging.getLogger(__name__)

EAGER_KV_BYTES = 4 << 30
"""Default KV memory on a GPU without our kernels, a mode for trial use."""

IDLE_TASK_S = 0.003
"""Target duration of an idle task in seconds: about 1/20 of a step."""
STEPS_PER_IDLE_TASK = 4
"""Under load, one idle task runs every so many steps. Measured: a step is 10% shorter with the weights on huge pages."""


class Worker:
    """A loaded model with its KV memory, its slot tables and its sampler."""

    def __init__(
        self,
        runner: Runner,
        ops: SamplingOps,
        device: torch.device,
        config: EngineConfig,
        num_blocks: int,
        facts: Mapping[str, str],
        span: Span = no_span,
        weights: HugePages | None = None,
        ranks: Ranks | None = None,
        stage: Stage | None = None,
        gather_fds: Sequence[int] = (),
    ) -> None:
        """Build the worker around a loaded model.

        weights: the host memory of the weights, while part of it is on small pages. ranks: the other ranks, which run
        idle tasks too. stage: the recorded program of the model, if there is one. gather_fds: see
        `quintet.executor.distributed.parallel.follower_processes`.
        """
        self.num_blocks = num_blocks
        self.facts: dict[str, str] = {**facts, "blocks": str(num_blocks)}
        self.runner = runner
        self._span = span
        self._weights = weights
        self._ranks = ranks
        self._stage = stage
        self.experts = None if stage is None else stage.expert_counts
        self._num_started = 0
        max_num_seqs, model = config.scheduler.max_num_seqs, config.model
        self.tables = SlotTables(max_num_seqs, model.max_model_len, model.kv, device)
        grammars = Grammars(max_num_seqs, model)
        self._sampler = Sampler(max_num_seqs, model.vocab_size, self.tables, ops, grammars=grammars)
        share, moves = WHOLE if ranks is None else ranks.share, Moves(ranks)
        own = HostBlocks(runner.blocks, model.kv.num_blocks(config.cache.swap_bytes), share.stripe)
        self._host_blocks = own if ranks is None else HostBlocksOfAllRanks(own, moves)
        self.num_host_blocks = self._host_blocks.num_blocks
        self.swap_bytes_per_s = self._host_blocks.measure()
        blocks: Callable[[], WholeBlocks] = partial(BlockBytes, runner.blocks)
        if ranks is not None:
            blocks = partial(open_whole_blocks, config, gather_fds, runner.blocks, share, moves)
        self._kv_tiers = KvTiers(blocks, config, type(runner).__name__, self._host_blocks)
        self.kv_back_ends = self._kv_tiers.back_ends
        if self.num_host_blocks:
            self.facts["swap"] = f"{self.num_host_blocks} blocks at {self.swap_bytes_per_s / 1e9:.1f} GB/s"
        self._oom_split = OomSplit(
            torch.cuda.empty_cache if device.type == "cuda" else lambda: None,
            self.tables.continue_states if model.kv.has_states else None,
        )

    @property
    def work_done(self) -> int:
        """The runner's progress counter."""
        return self.runner.work_done

    @property
    def num_active_slots(self) -> int:
        """Slots in use."""
        return self.tables.num_active_slots

    def reset(self) -> None:
        """Reset every table."""
        self.tables.reset()

    def is_broken(self, error: Exception) -> bool:
        """Return whether the process can no longer use the device, or its tables differ from the core's.

        After the first error that a CUDA kernel reports, a process cannot use the device; running out of memory is
        the exception. Tables that differ are a bug of the engine, not of a request.
        """
        if isinstance(error, torch.OutOfMemoryError):
            return False
        return isinstance(error, torch.AcceleratorError | TablesDiffer)

    @property
    def has_idle_tasks(self) -> bool:
        """True if weights of any rank remain on small pages, or experts on overloaded ranks."""
        if self._stage is not None and self._stage.has_idle_tasks:
            return True
        is_fragmented = self._weights is not None and self._weights.is_fragmented
        return is_fragmented or (self._ranks is not None and self._ranks.noted(Note.IDLE_TASKS) > 0)

    def run_idle_task(self) -> None:
        """Move some weights to huge pages on every rank, or copy an expert to another rank."""
        if self._stage is not None:
            self._stage.run_idle_task()
        if self._ranks is not None:
            self._ranks.send_idle_task()
        if self._weights is not None and self._weights.is_fragmented:
            self._weights.gather(IDLE_TASK_S)

    @property
    def num_split(self) -> int:
        """Steps split after running out of memory."""
        return self._oom_split.num_split

    def waits_for(self, plan: StepPlan) -> bool:
        """Return False: a step ends inside `begin`."""
        return False

    def begin(self, plan: StepPlan) -> Finished:
        """Execute the plan and wait for the device; the worker in `quintet.executor.backends.cuda` does not wait."""
        self._num_started += 1
        if self._num_started % STEPS_PER_IDLE_TASK == 0 and self.has_idle_tasks:
            self.run_idle_task()  # a busy server gains most
            self._span("idle_tasks", plan.step)
        return Finished(self.execute(plan))

    def execute(self, plan: StepPlan) -> StepResult:
        """Apply the plan's deltas, then its swaps and block copies; then compute its rows and draw tokens."""
        self.tables.apply(plan)
        check_tables(plan, self.tables)
        for row in plan.new_rows:
            self._sampler.admit(row)
        if plan.swaps_out:
            self._host_blocks.copy_out(plan.swaps_out)
        if plan.swaps_in:
            self._kv_tiers.copy_in(plan.swaps_in)
        if plan.copies:
            self._copy_blocks(plan.copies)
        self._span("tables", plan.step)
        if not plan.slots:
            return StepResult(plan.step, 0, b"")
        return self._oom_split.compute(plan, self._compute)

    def _compute(self, plan: StepPlan) -> StepResult:
        """Compute the rows of a plan, or of a part of one. The tables already hold its deltas."""
        rows = Rows(plan)
        masks = self._sampler.begin_masks(rows)
        result: StepResult | None = None
        if not self._sampler.needs_logits(rows):
            tokens = self.runner.forward_and_draw(rows, self.tables, self._sampler.settings, masks)
            if tokens is not None:
                result = StepResult(plan.step, 0, tokens)
        if result is None:
            result = self._compute_in_parts(plan, rows, masks)
        if masks is not None:
            masks.note(np.frombuffer(result.token_ids, np.int32).tolist())
            result.failed = masks.failed(rows.sampling)
        return result

    @torch.inference_mode()
    def _compute_in_parts(self, plan: StepPlan, rows: Rows, masks: StepMasks | None) -> StepResult:
        """Compute a step that needs logits, such as for log-probabilities, or a runner without fused sampling."""
        result = StepResult(plan.step, 0, b"")
        self.runner.forward(rows, self.tables)
        self._span("layers")
        result.prompt_logprobs = self._sampler.prompt_logprobs(rows, self.runner)
        if len(rows.sampling):
            last = rows.offsets[rows.sampling] + rows.counts[rows.sampling] - 1
            logits = self.runner.logits(last)
            self._span("logits")
            drawn, result.logprobs = self._sampler.draw(rows, logits, None if masks is None else masks.wait())
            result.token_ids = drawn.to(torch.int32).cpu().numpy().tobytes()
            self._span("sampling")
        return result

    def _copy_blocks(self, copies: bytes) -> None:
        pairs = np.frombuffer(copies, np.int32).reshape(-1, 2).astype(np.int64)
        sources = to_device(pairs[:, 0].copy(), self.tables.device)
        targets = to_device(pairs[:, 1].copy(), self.tables.device)
        self.runner.copy_blocks(sources, targets)


def make_worker(config: EngineConfig, span: Span = no_span, ahead: HugeMemory | None = None) -> StepWorker:
    """Open the device, build and load the model, reserve KV memory. ahead: memory for host weights, see `load_model`."""
    if config.executor.device != "cuda" or config.model.implementation == "transformers":
        return make_torch_worker(config, span, ahead=ahead)
    from quintet.executor.backends.cuda.boot import (
        make_device_worker,  # dozens of modules that only a GPU needs
    )
    from quintet.executor.backends.platforms.cuda import open_cuda_device

    started = time.monotonic()
    platform = open_platform(config.executor)
    device = open_cuda_device(config.executor)
    if device is None:
        return make_torch_worker(config, span)
    model = load_model(config, platform, on_device=True)
    facts = facts_of(config, platform, model.weights.num_bytes, started)
    return make_device_worker(device, model, config, MODEL_DTYPES[config.model.dtype], facts, span)


def make_torch_worker(
    config: EngineConfig,
    span: Span = no_span,
    ranks: Ranks | None = None,
    gather_fds: Sequence[int] = (),
    ahead: HugeMemory | None = None,
) -> Worker:
    """Return the worker of a CPU, of a GPU without our kernels, or of rank 0 of a model split over ranks."""
    started = time.monotonic()
    platform = open_platform(config.executor)
    num_blocks = num_blocks_of(config)
    if config.model.implementation == "transformers":
        return _make_transformers_worker(config, platform, num_blocks, started, span)
    share = share_of(config.executor, 0) if ranks is None else ranks.share
    model = load_model(config, platform, share=share, ahead=ahead)
    facts = facts_of(config, platform, model.weights.num_bytes, started)
    stage = _open_stage(model, config, platform, num_blocks, WHOLE if ranks is None else ranks.share, ranks)
    return Worker(
        _runner_of(stage, model, config, platform, num_blocks, span, ranks),
        sampling_ops_of(platform.name),
        platform.device,
        config,
        num_blocks,
        facts,
        span,
        model.weights.reservation,
        ranks,
        stage,
        gather_fds,
    )


def _make_transformers_worker(
    config: EngineConfig, platform: Platform, num_blocks: int, started: float, span: Span
) -> Worker:
    """Return the worker of a model that runs in transformers."""
    from quintet.executor.backends.torch.fallback.boot import (
        open_transformers_model,  # imports transformers: seconds
    )

    dtype = MODEL_DTYPES[config.model.dtype]
    opened = open_transformers_model(config, platform.device, dtype, num_blocks, span)
    facts = facts_of(config, platform, opened.num_bytes, started)
    ops = sampling_ops_of(platform.name)
    return Worker(opened.runner, ops, platform.device, config, num_blocks, facts, span)


def facts_of(config: EngineConfig, platform: Platform, num_bytes: int, started: float) -> dict[str, str]:
    """Return the start-up facts for the log. started: the `time.monotonic` value when the device was opened."""
    suffix = " by transformers" if config.model.implementation == "transformers" else ""
    return {
        "worker": f"{config.model.architecture}{suffix} in {config.model.dtype} on {platform.description}",
        "weights": f"{num_bytes / 1e6:.1f} MB in {time.monotonic() - started:.1f} s",
    }


def num_blocks_of(config: EngineConfig) -> int:
    """Return the number of KV blocks that fit in memory, for torch and the host kernels. Raises `ConfigError`."""
    memory_bytes = config.cache.memory_bytes or EAGER_KV_BYTES
    num_blocks = config.model.kv.num_blocks(memory_bytes)
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache has {memory_bytes} bytes, but one block needs {config.model.kv.bytes_per_block};"
            " raise --kv-cache-memory"
        )
    return num_blocks


def _runner_of(
    stage: Stage | None,
    model: CausalModel,
    config: EngineConfig,
    platform: Platform,
    num_blocks: int,
    span: Span,
    ranks: Ranks | None,
) -> Runner:
    """Return the recorded program if the compiled kernels support the model's shape, else an eager runner."""
    kv, dtype = config.model.kv, MODEL_DTYPES[config.model.dtype]
    widest = _widest(model)
    if stage is not None:
        return ProgramRunner(stage, config, span)
    if ranks is not None or config.executor.sum_leaves > 1:
        raise _not_compiled(model, config)
    if platform.name == "cpu" and program_library() is not None:
        log.warning(
            "computing with torch: the compiled attention supports head sizes up to 576 for keys and 512 for values, and block"
            " sizes that are multiples of 16 tokens; this model has head size %d and block size %d",
            widest,
            kv.block_size,
        )
    check_kv_dtype(config, widest)
    return EagerRunner(model, platform.device, dtype, kv, num_blocks, span)


def make_stage(
    model: CausalModel, config: EngineConfig, platform: Platform, share: Share, ranks: Ranks | None
) -> Stage:
    """Return one process's recorded part of a model that several processes compute."""
    stage = _open_stage(model, config, platform, num_blocks_of(config), share, ranks)
    if stage is None:
        raise _not_compiled(model, config)
    return stage


def _open_stage(
    model: CausalModel,
    config: EngineConfig,
    platform: Platform,
    num_blocks: int,
    share: Share,
    ranks: Ranks | None,
) -> Stage | None:
    """Return the recorded layers; None if the compiled kernels do not support them."""
    library = program_library() if platform.name == "cpu" else None
    if library is None:
        return None
    kv, dtype = config.model.kv, MODEL_DTYPES[config.model.dtype]
    code = DTYPE_CODES[NARROW_KV.get(config.cache.dtype, dtype)]
    if not all(takes_layer(library, layer, code, kv.block_size) for layer in model.attentions):
        return None
    memory = allocate_kv(kv, num_blocks, code, share, ranks)
    return Stage(library, model, config, dtype, memory, share, ranks)


def _widest(model: CausalModel) -> int:
    return max((max(layer.head_dim, layer.value_width) for layer in model.attentions), default=0)


def _not_compiled(model: CausalModel, config: EngineConfig) -> ConfigError:
    return ConfigError(
        "--tensor-parallel-size and --pipeline-parallel-size need the compiled attention, which supports head sizes up to 576"
        f" and block sizes that are multiples of 16 tokens; this model has head size {_widest(model)} and block size"
        f" {config.model.kv.block_size}: drop these flags"
    )


def check_kv_dtype(config: EngineConfig, head_dim: int) -> None:
    """Reject a quantized KV cache without the compiled attention: torch cannot read it. Raises `ConfigError`."""
    if config.cache.dtype in NARROW_KV:
        raise ConfigError(
            f"--kv-cache-dtype {config.cache.dtype} needs the compiled CPU kernels, which are not built or do not support"
            f" head size {head_dim} with block size {config.model.kv.block_size}: use --kv-cache-dtype model"
        )
