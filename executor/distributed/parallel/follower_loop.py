"""The follower loop: receive orders and execute them over the current step.

The leader of a stage sends orders to the stage's followers. The leader of a later stage receives orders from the
previous stage.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from functools import partial

from quintet.executor.backends.cpu.ops.huge_pages import HugePages
from quintet.executor.backends.cpu.program.stage import Stage
from quintet.executor.backends.cpu.program.step import Step
from quintet.executor.backends.platforms.platform import Platform, open_platform
from quintet.executor.distributed.parallel.kv_gather import PartBlocks, open_parts
from quintet.executor.distributed.parallel.library import PAIR_BYTES, Note, OrderKind, StepPart
from quintet.executor.distributed.parallel.rank_views import Links, open_links, open_ranks, share_of_rank
from quintet.executor.distributed.parallel.ranks import Ranks
from quintet.executor.distributed.parallel.whole_blocks import HostBlocksOfAllRanks, Moves
from quintet.executor.kv_transfer.host_blocks import HostBlocks
from quintet.executor.loading import load_model
from quintet.executor.model_config.share import Share
from quintet.executor.worker import IDLE_TASK_S, make_stage
from quintet.process.os_tuning import trim_memory
from quintet.process.trace import Span, no_span
from quintet.wire.config import EngineConfig

PROGRESS_EVERY_S = 0.2
"""Interval between progress notes of a stage."""


def run_follower(
    config: EngineConfig,
    groups: Sequence[int],
    links: Sequence[int],
    gather_fds: Sequence[int],
    rank: int,
    span: Span,
) -> None:
    """Run a rank with assigned processors until it is killed. groups, links, gather_fds: see `FollowerProcesses`."""
    platform, share = open_platform(config.executor), share_of_rank(config, rank)
    group = open_ranks(config, groups[share.stage], rank) if groups else None
    if share.rank == 0:
        opened = open_links(config, links, share.stage)
        _run_orders(run_stage(config, platform, share, group, opened, gather_fds, span))
    assert group is not None, "a rank that is not the first of its stage"
    _run_orders(follow(config, platform, group, gather_fds, span))


def _run_orders(orders: Iterator[OrderKind | None]) -> None:
    for kind in orders:
        if kind is None:
            gc.freeze()  # loaded objects live until the process exits


def follow(
    config: EngineConfig,
    platform: Platform,
    ranks: Ranks,
    gather_fds: Sequence[int] = (),
    span: Span = no_span,
) -> Iterator[OrderKind | None]:
    """Load the rank's share, report ready, and execute orders; yield None once, then each order's kind.

    config: with the rank's threads.
    """
    model = load_model(config, platform, share=ranks.share)
    stage = make_stage(model, config, platform, ranks.share, ranks)
    step = _step_of(stage, config)
    pages, host_blocks = model.weights.reservation, _host_blocks(stage, config)
    parts = _open_parts(config, stage, gather_fds)
    _report_loaded(ranks, pages)
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
            case OrderKind.COPY_BLOCKS:
                stage.copy_ordered(ranks.mail(order))
            case OrderKind.SWAP_OUT:
                host_blocks.copy_out(ranks.mail(order))
                ranks.wait_for_moved()
            case OrderKind.SWAP_IN:
                host_blocks.copy_in(ranks.mail(order))
                ranks.wait_for_moved()
            case OrderKind.CARRY_OUT | OrderKind.CARRY_IN:
                assert parts is not None, kind
                parts.carry(kind, ranks.mail(order))
                ranks.wait_for_moved()
                parts.done()
            case OrderKind.EMBEDS:
                stage.put_ordered(ranks.mail(order))
            case OrderKind.MOVE_EXPERT:
                stage.move_ordered(ranks.mail(order))
            case OrderKind.IDLE_TASK:
                pass
        ranks.done()
        if kind is OrderKind.IDLE_TASK:
            _run_idle_task(pages)  # after `done`: the leader runs its task meanwhile
            ranks.note(Note.IDLE_TASKS, _has_idle_tasks(pages))
        span("layers" if kind is OrderKind.RUN else "orders")
        yield kind


def run_stage(
    config: EngineConfig,
    platform: Platform,
    share: Share,
    group: Ranks | None,
    links: Links,
    gather_fds: Sequence[int] = (),
    span: Span = no_span,
) -> Iterator[OrderKind | None]:
    """Run the leader of a stage that is not the first, like `follow`. group: the stage's ranks, if there are several."""
    model = load_model(config, platform, share=share)
    stage = make_stage(model, config, platform, share, group)
    step, pages, num_runs = _step_of(stage, config), model.weights.reservation, 0
    preceding, following = links.preceding, links.following
    groups = [each for each in (group, None if share.is_last else following) if each is not None]
    moves = Moves(group, None if share.is_last else following)
    host_blocks = HostBlocksOfAllRanks(_host_blocks(stage, config), moves)
    parts = _open_parts(config, stage, gather_fds)
    for each in groups:
        each.wait_for_all()
    _report_loaded(preceding, pages)
    is_over = threading.Event()
    noting = (preceding, groups, stage, pages, is_over)
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
                    _run(stage, step, links, order.begin, order.end, order.length, span)
                case OrderKind.COPY_BLOCKS:
                    if not share.is_last:
                        following.send_mail(kind, preceding.mail(order), PAIR_BYTES)
                    stage.copy_ordered(preceding.mail(order))
                case OrderKind.SWAP_OUT:
                    host_blocks.copy_out(preceding.mail(order))
                case OrderKind.SWAP_IN:
                    host_blocks.copy_in(preceding.mail(order))
                case OrderKind.CARRY_OUT | OrderKind.CARRY_IN:
                    assert parts is not None, kind
                    moves.move(kind, preceding.mail(order), partial(parts.carry, kind))
                    parts.done()
                case OrderKind.IDLE_TASK:
                    stage.run_idle_task()
                    for each in groups:
                        each.send_idle_task()
                case OrderKind.EMBEDS | OrderKind.MOVE_EXPERT:
                    raise AssertionError(f"{kind.name}: only sent within a stage")
            preceding.done()
            if kind is OrderKind.IDLE_TASK:
                _run_idle_task(pages)
            span("layers" if kind is OrderKind.RUN else "orders")
            yield kind
    finally:
        is_over.set()


def _run(stage: Stage, step: Step, links: Links, begin: int, end: int, length: int, span: Span) -> None:
    """Run parts of a step, and send it to the next stage."""
    preceding, following, width, count = (
        links.preceding,
        links.following,
        stage.handed_width,
        step.c.num_tokens,
    )
    is_new = begin == StepPart.LAYERS
    if is_new:
        stage.take(preceding.payload(width, stage.dtype)[:count])
    first = 0 if is_new else stage.layers_end
    last = stage.end if end == StepPart.END else stage.layers_end
    if first < last:
        stage.rotations.reach(length)
        stage.run(step.address, first, last, length)
    span("layers")
    following.make_room()
    span("bubble")
    if stage.logits is not None:
        outputs = step.c.num_outputs
        following.payload(stage.logits.shape[1], stage.logits_dtype)[:outputs].copy_(stage.logits[:outputs])
        following.send_done(outputs)
        return
    if is_new:
        stage.write_handover(following.payload(width, stage.dtype)[:count])
    following.send_run(step.address, begin, end, length)


def _step_of(stage: Stage, config: EngineConfig) -> Step:
    step = Step(stage.library, stage.max_tokens, config.scheduler.max_num_seqs)
    step.c.rotations, step.c.marks = stage.rotations.address, None
    return step


def _host_blocks(stage: Stage, config: EngineConfig) -> HostBlocks:
    return HostBlocks(stage.blocks, config.model.kv.num_blocks(config.cache.swap_bytes), stage.share.stripe)


def _open_parts(config: EngineConfig, stage: Stage, gather_fds: Sequence[int]) -> PartBlocks | None:
    """Return the rank's part of blocks for KV transfer; None if there is no KV transfer."""
    share = stage.share
    rank = share.stage * share.size + share.rank
    return open_parts(config, gather_fds[0], rank, stage.blocks, share) if gather_fds else None


def _report_loaded(ranks: Ranks, pages: HugePages | None) -> None:
    trim_memory()
    ranks.note(Note.IDLE_TASKS, _has_idle_tasks(pages))


def _has_idle_tasks(pages: HugePages | None) -> bool:
    return pages is not None and pages.is_fragmented


def _run_idle_task(pages: HugePages | None) -> None:
    if pages is not None and pages.is_fragmented:
        pages.gather(IDLE_TASK_S)


def _report_progress(
    preceding: Ranks, groups: list[Ranks], stage: Stage, pages: HugePages | None, is_over: threading.Event
) -> None:
    """Report progress and idle tasks of this stage and of the following ones."""
    while not is_over.wait(PROGRESS_EVERY_S):
        preceding.note(Note.PROGRESS, stage.work_done + sum(each.noted(Note.PROGRESS) for each in groups))
        own = _has_idle_tasks(pages) or stage.has_idle_tasks
        preceding.note(Note.IDLE_TASKS, own + sum(each.noted(Note.IDLE_TASKS) for each in groups))
