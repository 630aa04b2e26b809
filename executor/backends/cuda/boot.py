"""Builds the worker of a device: runs the largest step, selects kernels, and allocates the KV cache in the memory left."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import torch

from quintet.executor.backends.cuda.attention.backend import AttentionBackend, AttentionNeeds
from quintet.executor.backends.cuda.attention.choice import BackendChoice, choose_attention, choose_for_ranks
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.gemm_dispatch import DeviceLinears, captured_stopwatch
from quintet.executor.backends.cuda.graphs import graph_sizes
from quintet.executor.backends.cuda.kv_memory import graph_bytes, num_kv_blocks
from quintet.executor.backends.cuda.ops.attention_plan import AttentionPlans
from quintet.executor.backends.cuda.ranks.communicator import (
    communicator_of,
    open_device_ranks,
)
from quintet.executor.backends.cuda.ranks.rank_broadcast import RankBroadcaster
from quintet.executor.backends.cuda.runner import DeviceRunner
from quintet.executor.backends.cuda.steps import DeviceSteps
from quintet.executor.backends.cuda.tables import DeviceTables, StepMemory
from quintet.executor.backends.cuda.worker import DeviceWorker
from quintet.executor.backends.platforms.cuda import open_cuda_device
from quintet.executor.context import WorkerContext
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.kv_memory import KvMemory
from quintet.executor.loading import MODEL_DTYPES
from quintet.executor.models.layers.attention import AttentionLayer
from quintet.executor.models.model import CausalModel
from quintet.wire.config import EngineConfig

log = logging.getLogger("quintet")

STAGING_WORDS = 1 << 20
"""Size of the staging buffer, enough for the prompts of a busy second; a larger plan gets temporary memory."""


def make_worker(context: WorkerContext) -> DeviceWorker:
    """See `quintet.executor.backends.registry.Backend`. Several ranks load their shares concurrently."""
    config, _ = context.config, context.platform  # the platform is opened first
    device = open_cuda_device(config.executor)
    if context.memory.stages:
        context.join(open_device_ranks(config, context.memory.stages[0], 0))
    worker = make_device_worker(device, context.load(on_device=True), context)
    worker.facts = {**context.facts(worker.num_blocks), **worker.facts}
    return worker


@torch.inference_mode()
def make_device_worker(device: Device, model: CausalModel, context: WorkerContext) -> DeviceWorker:
    """Return the worker, ready for plans; graphs are captured later. Raises `ConfigError` if memory is too small.

    With several ranks, return when all are ready; the others run `quintet.executor.backends.cuda.ranks.follower.follow`.
    """
    config, ranks = context.config, context.ranks
    steps, num_blocks = open_steps(device, model, context)
    broadcaster = None if ranks is None else RankBroadcaster(ranks)
    worker = DeviceWorker(steps, config, num_blocks, context.span, broadcaster)
    if ranks is not None:
        ranks.wait_for_all()
        worker.facts["ranks"] = str(ranks.share.size)
    return worker


@torch.inference_mode()
def open_steps(device: Device, model: CausalModel, context: WorkerContext) -> tuple[DeviceSteps, int]:
    """Return the model with its KV memory, ready for steps, and the number of KV blocks.

    Several ranks call it concurrently; all get the smallest block count of any rank.
    """
    config, ranks = context.config, context.ranks
    spec, scheduler, torch_device = config.model.kv, config.scheduler, device.torch_device
    dtype = MODEL_DTYPES[config.model.dtype]
    kv_dtype = torch.float8_e4m3fn if config.cache.dtype == "fp8" else dtype
    communicator = None if ranks is None else communicator_of(device, ranks, config)
    device.checks_arguments = True
    tables = DeviceTables.reserve(scheduler.max_num_seqs, config.model.max_model_len, spec, torch_device)
    memory = StepMemory.reserve(tables, scheduler)
    attention = AttentionPlans(device, model.attentions, config, memory.max_tokens, dtype, kv_dtype)
    staging = torch.zeros(STAGING_WORDS, dtype=torch.int32, device=torch_device)
    linears = DeviceLinears(device, batch_invariant=config.executor.batch_invariant)
    kv = KvMemory.reserve(spec, 1, kv_dtype, torch_device)
    runner = DeviceRunner(device, model, linears, attention, memory, staging, kv, dtype, communicator)
    started = time.monotonic()
    runner.run_largest_step()
    if is_gpu(device):  # times of the emulator are meaningless
        linears.measure(runner.last_pass.linears, ranks=ranks)
        layers = runner.last_pass.attentions
        runner.prompt_attention = _prompt_attention(device, attention, layers, config, ranks)
    # Captures emptied the allocator's cache: allocate the largest step's memory again before the KV cache takes the rest.
    runner.run_largest_step()
    device.checks_arguments = not is_gpu(device)
    if communicator is not None:
        runner.run_smallest_steps()
    reserved = 0
    if not config.executor.enforce_eager:
        sizes = (dtype.itemsize, config.logits_item_bytes)
        largest = graph_sizes(scheduler, memory.max_draws)[-1].num_tokens
        reserved = graph_bytes(largest, model.vocab_size, runner.last_pass.widest, *sizes)
    num_blocks = num_kv_blocks(config, device, reserved)
    if ranks is not None:
        counts = ranks.all_gather(num_blocks.to_bytes(8, "little"))
        num_blocks = min(int.from_bytes(count, "little") for count in counts)
    if communicator is not None:
        communicator.peers.limit_waits()  # every rank has loaded the kernels of a step
    runner.use_kv(KvMemory.reserve(spec, num_blocks, kv_dtype, torch_device))
    log.info(
        "largest step (%d tokens) and kernel selection took %.1f s; KV cache: %d blocks of %d tokens, %.1f GiB",
        *(memory.max_tokens, time.monotonic() - started),
        *(num_blocks, spec.block_size, num_blocks * spec.bytes_per_block / 2**30),
    )
    return DeviceSteps(runner, config, ranks), num_blocks


def is_gpu(device: Device) -> bool:
    """Return whether kernels run on a GPU rather than on the emulator."""
    return device.torch_device.type == "cuda"


def _prompt_attention(
    device: Device,
    plans: AttentionPlans,
    layers: Sequence[AttentionLayer],
    config: EngineConfig,
    ranks: Ranks | None,
) -> AttentionBackend | None:
    """Select the attention backend of prompts; None: our kernels, also if layers differ in parameters that a library fixes."""
    plan = plans.only
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
