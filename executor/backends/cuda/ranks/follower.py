"""Main loop of a rank other than 0: launches the orders of `quintet.executor.backends.cuda.ranks.rank_broadcast`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count

import numpy as np
import torch

from quintet.executor.backends.cuda.attention.backend import HostRows
from quintet.executor.backends.cuda.boot import open_steps
from quintet.executor.backends.cuda.device import Device
from quintet.executor.backends.cuda.ops.tables import HEADER_WORDS
from quintet.executor.backends.cuda.ranks.communicator import open_device_ranks
from quintet.executor.backends.cuda.ranks.rank_broadcast import (
    CaptureOrder,
    LogitsOrder,
    Order,
    RankReceiver,
    StepOrder,
)
from quintet.executor.backends.cuda.steps import DeviceSteps
from quintet.executor.backends.platforms.cuda import open_cuda_device
from quintet.executor.context import WorkerContext
from quintet.executor.models.model import CausalModel
from quintet.process.os_tuning import trim_memory


def run_follower(context: WorkerContext, rank: int) -> None:
    """Run a rank until its process is killed; its device is device 0 of the process."""
    assert not context.memory.links, "CUDA does not support pipeline stages"
    assert not context.memory.gather, "CUDA does not support KV transfer between ranks"
    config, _ = context.config, context.platform  # the platform is opened first
    device = open_cuda_device(config.executor)
    context.join(open_device_ranks(config, context.memory.stages[0], rank))
    for _ in follow(device, context.load(on_device=True), context):
        pass


@torch.inference_mode()
def follow(device: Device, model: CausalModel, context: WorkerContext) -> Iterator[Order]:
    """Start up with the other ranks, then execute orders without end; yield each order after its launches.

    model: this rank's shard.
    """
    ranks, (steps, _) = context.ranks, open_steps(device, model, context)
    communicator = steps.runner.communicator
    assert ranks is not None and communicator is not None
    receiver = RankReceiver(ranks)
    gc.freeze()
    trim_memory()
    ranks.done()
    for number in count(1):
        order = receiver.next()
        context.span("wait", number)
        communicator.peers.check()
        match order:
            case StepOrder():
                _launch(steps, order)
            case LogitsOrder():
                steps.runner.logits(np.frombuffer(bytearray(order.tokens), np.int64))
            case CaptureOrder():
                steps.capture_one()
        context.span("orders")
        yield order


def _launch(steps: DeviceSteps, order: StepOrder) -> None:
    """Launch a step as rank 0 does."""
    packed, runner = order.packed, steps.runner
    words = np.frombuffer(order.words, np.int32)
    buffer = steps.buffer_for(len(words))
    buffer.words[: len(words)] = words
    staging = steps.send(buffer, len(words))
    steps.move_blocks(packed, staging)
    if not packed.num_rows:
        runner.apply_deltas(staging)
        return
    embeds = order.step_embeds(runner.dtype, runner.device.torch_device)
    if order.graph_size is not None:
        steps.graph_of_size(order.graph_size, staging).replay()
        return
    rows = words[HEADER_WORDS:]
    host = HostRows(
        rows[packed.num_rows : 2 * packed.num_rows], rows[2 * packed.num_rows : 3 * packed.num_rows]
    )
    steps.compute(packed, staging, host, embeds)
