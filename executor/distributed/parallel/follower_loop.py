"""The follower loop: receive orders and execute them over the current step.

The leader of a stage sends orders to the stage's followers. The leader of a later stage receives orders from the
previous stage.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

from quintet.executor.backends.cpu.backend import open_program
from quintet.executor.backends.cpu.ops.huge_pages import gather_some, has_small_pages
from quintet.executor.backends.cpu.program.model_program import ModelProgram
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.context import WorkerContext
from quintet.executor.distributed.parallel.handover import Handover
from quintet.executor.distributed.parallel.library import Note, OrderKind, StepPart
from quintet.executor.distributed.parallel.rank_views import Links, open_links, open_ranks, share_of_rank
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.distributed.parallel.whole_blocks import Moves, OwnMoves, PartBlocks, own_moves
from quintet.executor.kv_transfer.host_blocks import HostBlocks
from quintet.executor.model_config.share import aux_layers_of
from quintet.process.os_tuning import trim_memory
from quintet.process.spans import TraceSpan
from quintet.wire.config import EngineConfig

PROGRESS_EVERY_S = 0.2
"""Interval between progress notes of a stage."""


def run_follower(context: WorkerContext, rank: int) -> None:
    """Run a rank with assigned processors until it is killed."""
    for kind in follow(context, rank):
        if kind is None:
            gc.freeze()  # loaded objects live until the process exits


def follow(context: WorkerContext, rank: int) -> Iterator[OrderKind | None]:
    """Load the rank's share, report ready, and execute orders; yield None once, then each order's kind."""
    config, memory = context.config, context.memory
    context.share = share_of_rank(config, rank)
    if memory.stages:
        context.join(open_ranks(config, memory.stages[context.share.stage], rank))
    if context.share.rank == 0:
        return _run_stage(context)
    return _run_rank(context)


def _run_rank(context: WorkerContext) -> Iterator[OrderKind | None]:
    """Run a rank that is not the leader of its stage."""
    ranks, span = context.ranks, context.span
    assert ranks is not None, "a rank that is not the first of its stage"
    stage = open_program(context)
    step = _step_of(stage, context.config)
    moves = _own_moves(context, stage)
    _report_loaded(ranks, context)
    yield None
    ranks.done()
    num_runs = 0
    while True:
        order = ranks.receive(step.address)
        kind = OrderKind(order.kind)
        num_runs += kind is OrderKind.RUN
        span("wait", num_runs)
        match kind:
            case OrderKind.RUN:
                stage.run_ordered(step.address, order.begin, order.end, order.length)
            case OrderKind.EMBEDS:
                stage.put_ordered(ranks.items(order))
            case OrderKind.MOVE_EXPERT:
                stage.move_ordered(ranks.items(order))
            case OrderKind.IDLE_TASK:
                pass
            case _:
                moves[kind](ranks.items(order))
                ranks.wait_for_moved()
        ranks.done()
        if kind is OrderKind.IDLE_TASK:
            gather_some(context.pages)  # after `done`: the leader runs its task meanwhile
            ranks.note(Note.IDLE_TASKS, has_small_pages(context.pages))
        span("layers" if kind is OrderKind.RUN else "orders")
        yield kind


def _run_stage(context: WorkerContext) -> Iterator[OrderKind | None]:
    """Run the leader of a stage that is not the first."""
    config, share, ranks, span = context.config, context.share, context.ranks, context.span
    links = open_links(config, context.memory.links, share.stage)
    stage = open_program(context)
    step, num_runs = _step_of(stage, config), 0
    handover = Handover(stage, aux_layers_of(config.scheduler))
    preceding, following = links.preceding, links.following
    others = [each for each in (ranks, None if share.is_last else following) if each is not None]
    moves = Moves(_own_moves(context, stage), ranks, None if share.is_last else following)
    for each in others:
        each.wait_for_all()
    _report_loaded(preceding, context)
    is_over = threading.Event()
    noting = (preceding, others, stage, context, is_over)
    threading.Thread(target=_report_progress, args=noting, name="progress", daemon=True).start()
    yield None
    preceding.done()
    try:
        while True:
            order = preceding.receive(step.address)
            kind = OrderKind(order.kind)
            num_runs += kind is OrderKind.RUN
            span("wait", num_runs)
            match kind:
                case OrderKind.RUN:
                    _run(handover, step, links, order.begin, order.end, order.length, span)
                case OrderKind.IDLE_TASK:
                    stage.run_idle_task()
                    for each in others:
                        each.send_idle_task()
                case OrderKind.EMBEDS | OrderKind.MOVE_EXPERT:
                    raise AssertionError(f"{kind.name}: only sent within a stage")
                case _:
                    moves.move(kind, preceding.items(order))
            preceding.done()
            if kind is OrderKind.IDLE_TASK:
                gather_some(context.pages)
            span("layers" if kind is OrderKind.RUN else "orders")
            yield kind
    finally:
        is_over.set()


def _run(
    handover: Handover, step: Step, links: Links, begin: int, end: int, length: int, span: TraceSpan
) -> None:
    """Run parts of a step, and send it to the next stage."""
    stage, following, count = handover.stage, links.following, step.c.num_tokens
    is_new = begin == StepPart.LAYERS
    if is_new:
        handover.take(links.preceding, count)
    first = 0 if is_new else stage.layers_end
    last = stage.end if end == StepPart.END else stage.layers_end
    if first < last:
        stage.rotations.reach(length)
        stage.run(step.address, first, last, length)
    span("layers")
    following.make_room()
    span("bubble")
    if stage.logits is not None:
        sizes = step.c.num_outputs, count if is_new else 0
        handover.write_result(following, *sizes)
        following.send_done(*sizes)
        return
    if is_new:
        handover.write(following, count)
    following.send_run(step.address, begin, end, length)


def _step_of(stage: ModelProgram, config: EngineConfig) -> Step:
    step = Step(stage.library, stage.max_tokens, config.scheduler.max_num_seqs)
    step.c.rotations, step.c.marks = stage.rotations.address, None
    return step


def _own_moves(context: WorkerContext, stage: ModelProgram) -> OwnMoves:
    """Return the rank's part of all moves; of transfers, if KV back ends are configured."""
    config, share, layers = context.config, stage.share, stage.kv.blocks
    num_host_blocks = config.model.kv.num_offloaded_blocks(config.cache.swap_bytes)
    rank = share.stage * share.size + share.rank
    parts = [PartBlocks(config, each, rank, layers, share) for each in context.memory.gather]
    return own_moves(stage.kv, HostBlocks(layers, num_host_blocks, share.stripe), *parts)


def _report_loaded(ranks: Ranks, context: WorkerContext) -> None:
    trim_memory()
    ranks.note(Note.IDLE_TASKS, has_small_pages(context.pages))


def _report_progress(
    preceding: Ranks,
    others: list[Ranks],
    stage: ModelProgram,
    context: WorkerContext,
    is_over: threading.Event,
) -> None:
    """Report progress and idle tasks of this stage and of the following ones."""
    while not is_over.wait(PROGRESS_EVERY_S):
        preceding.note(Note.PROGRESS, stage.work_done + sum(each.noted(Note.PROGRESS) for each in others))
        own = has_small_pages(context.pages) or stage.has_idle_tasks
        preceding.note(Note.IDLE_TASKS, own + sum(each.noted(Note.IDLE_TASKS) for each in others))
