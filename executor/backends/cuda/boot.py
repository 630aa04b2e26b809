"""Builds the worker of a device: runs the largest step, selects kernels, and allocates the KV cache in the memory left."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from quintet.executor.backends.cuda.attention.backend import AttentionBackend, AttentionNeeds
from quintet.executor.backends.cuda.attention.choice import BackendChoice, choose_attention, choose_for_ranks
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.draft_runner import DraftRunner
from quintet.executor.backends.cuda.gemm_dispatch import DeviceLinears, captured_stopwatch
from quintet.executor.backends.cuda.graphs import graph_sizes
from quintet.executor.backends.cuda.head_drafter import DeviceHeadDrafter, DeviceMedusaDrafter
from quintet.executor.backends.cuda.kv_memory import graph_bytes, num_kv_blocks
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlans
from quintet.executor.backends.cuda.ranks.communicator import (
    DeviceCommunicator,
    communicator_of,
    open_device_ranks,
)
from quintet.executor.backends.cuda.ranks.rank_broadcast import RankBroadcaster
from quintet.executor.backends.cuda.runner import DeviceRunner
from quintet.executor.backends.cuda.steps import DeviceSteps
from quintet.executor.backends.cuda.tables import DeviceTables, StepMemory
from quintet.executor.backends.cuda.worker import DeviceWorker
from quintet.executor.backends.platforms.cuda import open_cuda_device
from quintet.executor.context import DRAFT, TARGET, WorkerContext
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.kv_memory import KvMemory
from quintet.executor.loading import MODEL_DTYPES
from quintet.executor.model_config.share import aux_layers_of
from quintet.executor.models.decoder import Decoder
from quintet.executor.models.draft_heads import MedusaHeads, MtpHead
from quintet.executor.models.model import CausalModel
from quintet.executor.sampling.sampler import Sampler
from quintet.executor.slots import SlotTables
from quintet.executor.speculation.draft_model import DraftModel, draft_tokens
from quintet.executor.speculation.drafters import Drafter
from quintet.executor.speculation.head import DraftHead
from quintet.wire.config import DraftModelConfig, EngineConfig

log = logging.getLogger("quintet")

STAGING_WORDS = 1 << 20
"""Size of the staging buffer, enough for the prompts of a busy second; a larger plan gets temporary memory."""
DRAFT_STAGING_WORDS = 64
"""Size of a draft model's staging buffer for each request: its row in a step, and most changes of tables."""


def make_worker(context: WorkerContext) -> DeviceWorker:
    """See `quintet.executor.backends.registry.Backend`. Several ranks load their shares concurrently."""
    config, _ = context.config, context.platform  # the platform is opened first
    device = open_cuda_device(config.executor)
    if context.memory.stages:
        context.join(open_device_ranks(config, context.memory.stages[0], 0))
    model, draft = context.load(on_device=True), context.of_draft(draft_tokens(config.scheduler))
    if draft is not None:
        draft.load(on_device=True)
        context.models[DRAFT] = draft.models[TARGET]
    worker = make_device_worker(device, model, context, draft)
    worker.facts = {**context.facts(worker.num_blocks), **worker.facts}
    return worker


@torch.inference_mode()
def make_device_worker(
    device: Device, model: CausalModel, context: WorkerContext, draft: WorkerContext | None = None
) -> DeviceWorker:
    """Return the worker, ready for plans; graphs are captured later. Raises `ConfigError` if memory is too small.

    draft: of a loaded draft model or head. With several ranks, return when all are ready; the others run
    `quintet.executor.backends.cuda.ranks.follower.follow`.
    """
    config, ranks = context.config, context.ranks
    steps, layers = open_steps(device, model, context, draft)
    broadcaster = None if ranks is None else RankBroadcaster(ranks)
    make_drafter = None if draft is None else partial(_make_drafter, config, draft.load(), layers)
    worker = DeviceWorker(steps, config, context.span, broadcaster, layers, make_drafter)
    if ranks is not None:
        ranks.wait_for_all()
        worker.facts["ranks"] = str(ranks.share.size)
    return worker


@torch.inference_mode()
def open_steps(
    device: Device, model: CausalModel, context: WorkerContext, draft: WorkerContext | None = None
) -> tuple[DeviceSteps, Sequence[DraftRunner]]:
    """Return the model with its KV memory, ready for steps, and the draft model or the layers of a head, if there is one.

    Several ranks call it concurrently; all get the smallest block count of any rank.
    """
    config, ranks = context.config, context.ranks
    spec, scheduler, torch_device = config.model.kv, config.scheduler, device.torch_device
    communicator = None if ranks is None else communicator_of(device, ranks, config)
    device.checks_arguments = True
    tables = DeviceTables.reserve(scheduler.max_num_seqs, config.model.max_model_len, spec, torch_device)
    runner = _new_runner(device, model, config, tables, STAGING_WORDS, communicator)
    runners, of_draft = [(runner, config)], list[DeviceRunner]()
    if draft is not None:
        of_draft = _new_draft_runners(device, draft, model, context, tables)
        runners += [(each, draft.config) for each in of_draft]
        runner.aux_layers = aux_layers_of(scheduler)
        runner.keeps_hidden = len(runner.aux_layers) > 0
    started = time.monotonic()
    for each, _ in runners:
        each.run_largest_step()
    if is_gpu(device):  # times of the emulator are meaningless
        for each, _ in runners:
            each.linears.measure(each.last_pass.linears, ranks=ranks if each is runner else None)
        runner.prompt_attention = _prompt_attention(runner, config, ranks)
    # Captures emptied the allocator's cache: allocate the largest steps' memory again before the KV cache takes the rest.
    for each, _ in runners:
        each.run_largest_step()
    device.checks_arguments = not is_gpu(device)
    if communicator is not None:
        runner.run_smallest_steps()
    # Each rank's configuration has an equal part of the draft model's memory.
    draft_bytes = spec.draft_bytes * config.executor.tensor_parallel_size if of_draft else 0
    reserved = sum(_graph_bytes(*each) for each in runners)
    if draft is not None and isinstance(draft.load(), MedusaHeads):
        reserved += _kept_bytes(config, of_draft[0])
    num_blocks = num_kv_blocks(config, device, reserved, draft_bytes)
    if ranks is not None:
        counts = ranks.all_gather(num_blocks.to_bytes(8, "little"))
        num_blocks = min(int.from_bytes(count, "little") for count in counts)
    if communicator is not None:
        communicator.peers.limit_waits()  # every rank has loaded the kernels of a step
    runner.use_kv(KvMemory.reserve(spec, num_blocks, runner.kv.dtype, torch_device))
    if of_draft:
        first = of_draft[0].kv
        kv = KvMemory.reserve(first.spec, num_blocks, first.dtype, torch_device)
        for each in of_draft:
            each.use_kv(kv)
    log.info(
        "largest step (%d tokens) and kernel selection took %.1f s; KV cache: %d blocks of %d tokens, %.1f GiB",
        *(scheduler.max_num_batched_tokens, time.monotonic() - started),
        *(num_blocks, spec.block_size, num_blocks * (spec.offloaded_bytes_per_block + draft_bytes) / 2**30),
    )
    layers = [DraftRunner(DeviceSteps(*each), _draft_of(config).group) for each in runners[1:]]
    return DeviceSteps(runner, config, ranks), layers


def _new_runner(
    device: Device,
    model: CausalModel,
    config: EngineConfig,
    tables: DeviceTables,
    staging_words: int,
    communicator: DeviceCommunicator | None = None,
) -> DeviceRunner:
    """Return a runner with KV memory of one block."""
    dtype, torch_device = MODEL_DTYPES[config.model.dtype], device.torch_device
    kv_dtype = torch.float8_e4m3fn if config.cache.dtype == "fp8" else dtype
    memory = StepMemory.reserve(tables, config.scheduler)
    attention = AttentionPlans(device, model.attentions, config, memory.max_tokens, dtype, kv_dtype)
    staging = torch.zeros(staging_words, dtype=torch.int32, device=torch_device)
    linears = DeviceLinears(device, batch_invariant=config.executor.batch_invariant)
    kv = KvMemory.reserve(config.model.kv, 1, kv_dtype, torch_device)
    return DeviceRunner(device, model, linears, attention, memory, staging, kv, dtype, communicator)


def _new_draft_runners(
    device: Device, draft: WorkerContext, served: CausalModel, context: WorkerContext, tables: DeviceTables
) -> list[DeviceRunner]:
    """Return the runner of a draft model, or those of a head's layers. context, tables: of the served model."""
    config, model, kv = context.config, draft.load(), draft.config.model.kv
    group = _draft_of(config).group
    own_tables = replace(tables, block_table=tables.block_table[group : group + 1], kv=kv)
    num_words, layers = DRAFT_STAGING_WORDS * config.scheduler.max_num_seqs, [model]
    if isinstance(model, DraftHead | MedusaHeads):
        assert isinstance(served, Decoder), "the configuration allows draft heads of decoders only"
        model.share(served)
        layers = list(model.heads if isinstance(model, MedusaHeads) else model.layers)
        if isinstance(model, MtpHead):
            whole = served if context.ranks is None else context.load_output(on_device=True)
            assert isinstance(whole, Decoder), "as the model"
            model.share_output(whole)
    runners = [_new_runner(device, layer, draft.config, own_tables, num_words) for layer in layers]
    for each in runners:
        each.keeps_hidden = isinstance(model, DraftHead)
    return runners


def _draft_of(config: EngineConfig) -> DraftModelConfig:
    speculative = config.scheduler.speculative
    assert speculative is not None and speculative.draft is not None, "there is a draft model"
    return speculative.draft


def _make_drafter(
    config: EngineConfig,
    model: CausalModel | DraftHead | MedusaHeads,
    layers: Sequence[DraftRunner],
    tables: SlotTables,
    sampler: Sampler,
) -> Drafter:
    """Return the drafter of a draft model or head. config, tables, sampler: of the served model; the tables are on the host."""
    draft = _draft_of(config)
    if isinstance(model, DraftHead):
        return DeviceHeadDrafter(draft, model, layers, tables, sampler)
    if isinstance(model, MedusaHeads):
        return DeviceMedusaDrafter(model, layers, _max_drafts(config), tables, sampler)
    sizes = draft_tokens(config.scheduler), config.model.vocab_size
    return DraftModel(draft, layers[0], layers[0].steps.runner.kv, *sizes, tables, sampler)


def _kept_bytes(config: EngineConfig, head: DeviceRunner) -> int:
    """Return the memory of features that `DeviceMedusaDrafter` keeps; those of other heads are counted by block."""
    return config.scheduler.max_num_seqs * (1 + _max_drafts(config)) * head.received_hidden[0].nbytes


def _max_drafts(config: EngineConfig) -> int:
    assert config.scheduler.speculative is not None, "there are drafts"
    return config.scheduler.speculative.num_speculative_tokens


def _graph_bytes(runner: DeviceRunner, config: EngineConfig) -> int:
    """Return the memory to leave for graphs."""
    if config.executor.enforce_eager:
        return 0
    largest = graph_sizes(config.scheduler, runner.max_draws)[-1].num_tokens
    sizes = runner.dtype.itemsize, config.logits_item_bytes
    return graph_bytes(largest, config.model.vocab_size, runner.last_pass.widest, *sizes)


def is_gpu(device: Device) -> bool:
    """Return whether kernels run on a GPU rather than on the emulator."""
    return device.torch_device.type == "cuda"


def _prompt_attention(
    runner: DeviceRunner, config: EngineConfig, ranks: Ranks | None
) -> AttentionBackend | None:
    """Select the attention backend of prompts; None: our kernels, also if layers differ in parameters that a library fixes."""
    device, plan, layers = runner.device, runner.attention.only, runner.last_pass.attentions
    if not layers:
        return None
    if len(config.model.kv.groups) > 1:
        log.info("attention of prompts: quintet (layers in %d groups)", len(config.model.kv.groups))
        return None
    scales = {layer.scale for layer in layers}
    has_kv_scales = any(layer.kv_scales.of_layer != (1.0, 1.0) for layer in layers)
    if plan is None or len(scales) > 1 or has_kv_scales:
        log.info("attention of prompts: quintet (layers differ in heads or scale)")
        return None
    is_usual = plan.head_dim == plan.value_dim and not any(
        attention_window.chunk for attention_window in plan.attention_windows
    )
    if not is_usual or not all(layer.is_product for layer in layers):
        log.info("attention of prompts: quintet (softcap, ALiBi, sinks, chunks, or another width of values)")
        return None
    needs = AttentionNeeds(
        dtype=plan.dtype,
        kv_dtype=plan.kv_dtype,
        num_heads=plan.num_heads,
        num_kv_heads=plan.num_kv_heads,
        head_dim=plan.head_dim,
        block_size=config.model.kv.block_size,
        scale=scales.pop(),
        max_model_len=config.model.max_model_len,
        windows=tuple(attention_window.window for attention_window in plan.attention_windows),
        batch_invariant=config.executor.batch_invariant,
    )
    requested, stopwatch = config.executor.attention_backend, captured_stopwatch(device)

    def choose(name: str) -> BackendChoice:
        return choose_attention(name, device, plan, needs, stopwatch)

    return (choose(requested) if ranks is None else choose_for_ranks(requested, ranks, choose)).backend
