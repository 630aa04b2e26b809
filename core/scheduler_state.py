"""Scheduler state: requests, slots and blocks, and the transitions between waiting, running and ended.

It holds no policy: `quintet.core.scheduler` and `quintet.core.commit` decide.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

import msgspec

from quintet.core.counters import Counters
from quintet.core.hooks import Attach, Hooks
from quintet.core.kv.groups import Groups
from quintet.core.kv.pool import BlockPool
from quintet.core.kv.prefix import digest_after, key_of
from quintet.core.kv.prefix_paths import PrefixPaths
from quintet.core.kv_services.kv_events import KvEvents
from quintet.core.requests.request import Request, RequestStats, Status
from quintet.core.throughput import Throughput

by_rank = attrgetter("rank")

MAX_ENDED = 1 << 15
"""Number of ended requests that are remembered; exceeds the number that ends while a tokenizer is replaced."""


@dataclass(slots=True, frozen=True)
class Limits:
    """Bounds of every step, from the configuration and the executor's capacity."""

    num_blocks: int
    block_size: int
    num_slots: int
    max_running: int
    """One token of each must fit into a step, so that no request starves."""
    max_model_len: int
    max_batched: int
    watermark: int
    """Blocks that stay free when a request enters while others run, so that it does not preempt them at once."""
    max_prompt: int | None
    """Longest prompt, when it must be computed in one step."""
    prefix_caching: bool
    audit: bool
    """Send a checksum of the block tables with each plan."""
    block_bytes: int
    """Size of a block's keys and values, in all layers of all ranks, without the draft model's."""
    block_copy_ns: int
    """Time of one block copy between device and host; ranks copy in parallel."""
    groups: Groups
    stages: int
    """See `quintet.wire.config.SchedulerConfig.stages`."""
    max_request_len: int
    """Maximum tokens of a request that runs alone."""

    def taken_by(self, num_tokens: int) -> int:
        """Return the KV tokens that a request of this length takes; see `Groups.taken_by`."""
        return num_tokens if self.groups.is_plain else int(self.groups.taken_by(num_tokens))


class InFlightPlan(msgspec.Struct):
    """A plan that was sent and not committed yet."""

    step: int
    rows: list[Request]
    generations: list[int]
    ends: list[int]
    """Per row: end of the computed positions (exclusive). With drafts in flight it is a lower bound."""
    samples: bytes
    drafts: bytes
    """Per row: 1 + drafts that it may verify; empty without drafts."""
    num_unverified_drafts: list[int]
    """Per row: largest error of its end, from drafts of this step and of earlier ones; empty without drafts."""
    counts: list[int]
    num_active_slots: int
    """Occupied slots after the plan."""
    planned_ns: int


class RequestEnd(msgspec.Struct, frozen=True):
    """Metrics of an ended choice that was scheduled."""

    stats: RequestStats
    longest: int | None
    """Most outputs of any choice; set for the last choice of a request."""


@dataclass(slots=True)
class SchedulerState:
    """All requests, blocks and slots of one executor's tables."""

    limits: Limits
    hooks: Hooks
    pool: BlockPool
    live: dict[int, Request] = field(default_factory=dict)
    num_reserved: int = 0
    """KV tokens that the live requests take when each reaches its limit (`Limits.taken_by`)."""
    ended: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Attempt of each recently ended request, oldest first: a duplicate that arrives late is not a new request."""
    running: list[Request] = field(default_factory=list)
    """Sorted by rank."""
    waiting: list[Request] = field(default_factory=list)
    """Sorted by rank."""
    in_flight: deque[InFlightPlan] = field(default_factory=deque)
    step: int = 0
    """Number of the newest plan."""
    generation: int = 0
    """Newest generation assigned."""
    free_slots: list[int] = field(default_factory=list)
    """A heap: low rows are used first."""
    events: KvEvents | None = None
    """Queue of KV events for external routers; None when disabled."""
    freed_slots: list[int] = field(default_factory=list)
    """Slots that were freed since the last plan."""
    prefix_paths: PrefixPaths = field(default_factory=PrefixPaths)
    """Cached prefixes, for the admin API."""
    counters: Counters = field(default_factory=Counters)
    throughput: Throughput = field(default_factory=Throughput)
    queue_times_ns: list[int] = field(default_factory=list)
    """Queue times observed since this list was last drained."""
    endings: list[RequestEnd] = field(default_factory=list)
    """Ended choices since this list was last drained."""
    retained: list[Request] = field(default_factory=list)
    """Ended requests that stay resumable, since this list was last drained."""
    unreported: list[Request] = field(default_factory=list)
    """Requests that ended when they lost their slots and are not reported yet."""
    trial: frozenset[int] | None = None
    """Only these requests may run: a poison-isolation trial is active. None: all may."""
    num_claims: Counter[str] = field(default_factory=Counter)
    """Live requests that need a feature's plan columns, by feature."""
    attaching: tuple[Attach, ...] = ()
    """Hooks of the features with such requests."""
    num_deferred: int = 0
    """Waiting requests that others passed in the last step for another reason than missing blocks."""

    @property
    def fence(self) -> int | None:
        """The step after which a block released now may be reused; None when it may be reused at once."""
        return self.in_flight[-1].step if self.in_flight else None

    @property
    def is_waiting_for_contents(self) -> bool:
        """True when no step is in flight but KV transfers are: there may be nothing to compute until they finish."""
        return not self.in_flight and any(tier.is_awaited for tier in self.pool.tiers.remote)

    @property
    def num_unreserved(self) -> int:
        """KV tokens left when all live requests reach their limits; negative when they do not fit."""
        return self.limits.num_blocks * self.limits.block_size - self.num_reserved

    def has_spare_blocks(self, request: Request, num_blocks: int) -> bool:
        """Return True if ``num_blocks`` are available in addition to the blocks that a waiting request takes on entry."""
        groups = self.limits.groups
        needed = groups.spec.most_blocks(len(request.tokens), groups.step_tokens) + num_blocks
        return needed <= self.pool.num_available - self.limits.watermark

    def add(self, request: Request) -> None:
        """Add a request that was just admitted."""
        self.live[request.request_id] = request
        self.num_reserved += self.limits.taken_by(request.limit)
        self.claim(request)
        self.enqueue(request)

    def claim(self, request: Request, count: int = 1) -> None:
        """Count a request at each feature that attaches plan columns for it; -1 to release it."""
        claimed = [name for name, claim, _ in self.hooks.columns if claim(self, request)]
        if claimed:
            self.num_claims.update(dict.fromkeys(claimed, count))
            self.attaching = tuple(hook for name, _, hook in self.hooks.columns if self.num_claims[name])

    def enqueue(self, request: Request) -> None:
        """Insert a request without slot and blocks into the queue, at its rank."""
        insort(self.waiting, request, key=by_rank)

    def start(self, request: Request) -> None:
        """Move a request from the queue into a free slot."""
        self._remove(self.waiting, request)
        if request.stats.scheduled_ns is None:
            request.tokens = request.tokens.copy()  # shared with the other choices until now
        self.generation += 1
        request.generation = self.generation
        request.slot = heappop(self.free_slots)
        request.status = Status.RUNNING
        insort(self.running, request, key=by_rank)

    def defer_preempt(self, request: Request) -> None:
        """Preempt a running request, or mark it for preemption if its state needs the token that a step in flight draws.

        The newest state continues with that token. This does not delay its blocks: they would be fenced until then.
        """
        if self.limits.groups.states and request.length > len(request.tokens) and not request.is_draining:
            request.is_preempt_deferred = True
        else:
            self.preempt(request)

    def preempt(self, request: Request) -> None:
        """Release all slots and blocks of a running request and queue it again. Its token ids suffice to recompute it.

        A draining request ends instead: the tokens it waited for are lost, and no client needs them.
        """
        if request.is_draining:
            self.unreported.append(request)
            self.retire(request)
            return
        if request.planned < len(request.tokens):  # otherwise the token after the state is unknown
            self._register_end(request)
        for hook in self.hooks.on_preempt:
            hook(self, request)
        self._leave(request)
        request.status = Status.WAITING
        self.counters.preemptions += 1
        request.stats.num_preemptions += 1
        self.enqueue(request)

    def retire(self, request: Request) -> None:
        """End a request and release everything it holds. No other method ends requests."""
        if request.status is Status.RUNNING:
            self._register_end(request)
            self._leave(request)
        else:
            self._remove(self.waiting, request)
            if self.pool.tiers.all:
                self.pool.tiers.forget(request.request_id)
            if request.parent is not None:
                self.release_fork_state(request.parent)
        request.status = Status.ENDED
        del self.live[request.request_id]
        self.num_reserved -= self.limits.taken_by(request.limit)
        self.claim(request, -1)
        self.note_ended(request)
        if request.delivery.origin is not None:
            self.retained.append(request)
        stats, first = request.stats, (request.parent or request).stats
        first.num_open -= 1
        first.longest = max(first.longest, request.num_outputs)
        if stats.scheduled_ns is not None:
            if self.limits.prefix_caching and request.kv.digests:
                self.prefix_paths.add(request.kv.digests, None if request.embeds else request.tokens)
            self.throughput.outputs.note(request.num_outputs)
            self.endings.append(RequestEnd(stats, None if first.num_open else first.longest))

    def drain(self, request: Request) -> bool:
        """Stop planning a request that is to be retained. Return True when it can leave now.

        Otherwise its limit becomes the tokens in flight, so that none of them is drawn twice.
        """
        request.is_draining = True
        if request.status is not Status.RUNNING or request.length == len(request.tokens):
            return True
        self.num_reserved += self.limits.taken_by(request.length) - self.limits.taken_by(request.limit)
        request.limit = request.length
        request.plan_until = request.length - request.num_unverified_drafts
        return False

    def register_blocks(self, request: Request, num_tokens: int) -> None:
        """Register the full blocks among the request's first ``num_tokens`` tokens, which must be known.

        Called when a plan computes them, not when its result arrives. The content of a block is fixed by then, and
        readers run later: a later plan runs later, and within one plan a step writes KV for all rows before it reads
        (`StepPlan`). A plan is executed whole even if requests have left since, so preemption takes nothing back. If
        the executor fails, all blocks are forgotten.
        """
        block_size = self.limits.block_size
        if not self.limits.prefix_caching:
            request.register_at = request.limit + 1
            return
        num_full = num_tokens // block_size
        digests = request.hash_blocks(block_size, num_full)
        register = self.pool.index.register
        first = request.register_at // block_size - 1
        request.register_at = (num_full + 1) * block_size
        if self.events is not None:
            self.events.stored(request, first, num_full)
        for tier in self.pool.tiers.remote:
            tier.completed(digests, first, num_full)
        if self.limits.groups.is_plain:
            blocks = request.kv.held[0].blocks
            for position in range(first, num_full):
                register(digests[position], blocks[position])
            return
        for group in self.limits.groups.tokens:
            held = request.kv.held[group]
            for position in range(max(first, held.begin), min(num_full, held.end)):
                register(key_of(digests[position], group), held.blocks[position - held.begin])
        if request.kv.pending_states:
            self._register_pending_states(request, num_tokens)

    def register_state(
        self, request: Request, num_tokens: int, blocks: list[int], tails: dict[int, int] | None = None
    ) -> None:
        """Register the state after the request's first ``num_tokens`` known tokens. blocks: one per state group.

        tails: by token group, the partly filled block after the last full one, if there is any.
        """
        block_size, index = self.limits.block_size, self.pool.index
        num_full, length = divmod(num_tokens, block_size)
        digests = request.hash_blocks(block_size, num_full)
        before = digests[num_full - 1] if num_full else request.salt_digest
        states = dict(zip(self.limits.groups.states, blocks, strict=True))
        if length:
            end = digest_after(before, request.tokens, num_tokens - length, num_tokens, request.embeds)
            index.register_end(before, end, length, states, tails or {})
            return
        for group, block in states.items():
            index.register(key_of(before, group), block)
        for tier in self.pool.tiers.remote:
            tier.completed_state(digests, num_full)

    def release_fork_state(self, request: Request) -> None:
        """Release the initial state of a request's further choices, once none of them waits."""
        if request.kv.fork_state_blocks and not any(other.parent is request for other in self.waiting):
            self.pool.release(request.kv.fork_state_blocks, self.fence)
            request.kv.fork_state_blocks = []

    def _register_end(self, request: Request) -> None:
        """Register the state and partial block that a request leaves, for a request that continues its tokens (next chat turn).

        It covers all planned tokens if all are known. A step planned before a stop token was known has computed that
        token, but no drafts: the executor proposes none after a stop token.
        """
        limits, planned = self.limits, request.planned
        if not (limits.groups.states and limits.prefix_caching):
            return
        is_exact = not request.num_unverified_drafts or request.tokens[-1] in request.stops
        if not is_exact or planned > len(request.tokens) or planned == request.kv.state_start:
            return
        if planned >= request.register_at:
            self.register_blocks(request, planned)
        position, length = divmod(planned, limits.block_size)
        held, tails = request.kv.held, dict[int, int]()
        if length:
            tails = {
                group: held[group].blocks[position - held[group].begin] for group in limits.groups.tokens
            }
        self.register_state(
            request, planned, [held[group].blocks[-1] for group in limits.groups.states], tails
        )

    def _register_pending_states(self, request: Request, num_tokens: int) -> None:
        """Register states once all tokens before them are known, and release them."""
        while request.kv.pending_states and request.kv.pending_states[0][0] <= num_tokens:
            length, blocks = request.kv.pending_states.pop(0)
            self.register_state(request, length, blocks)
            self.pool.release(blocks, self.fence)

    def may_run(self, request: Request) -> bool:
        """Return True unless a poison-isolation trial excludes the request."""
        return self.trial is None or request.request_id in self.trial

    def has_seen(self, request_id: int, attempt: int) -> bool:
        """Return True when this attempt, or a newer one, is alive or has ended."""
        request = self.live.get(request_id)
        newest = self.ended.get(request_id) if request is None else request.delivery.attempt
        return newest is not None and newest >= attempt

    def note_first_token(self, request: Request, now_ns: int) -> None:
        """Record the time of a request's first drawn token."""
        if not request.has_drawn:
            request.has_drawn, request.stats.first_token_ns = True, now_ns
            self.counters.first_tokens += 1

    def note_ended(self, request: Request) -> None:
        """Remember an ended request; forget the oldest beyond `MAX_ENDED`."""
        self.ended[request.request_id] = request.delivery.attempt
        self.ended.move_to_end(request.request_id)
        if len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    def _leave(self, request: Request) -> None:
        self._remove(self.running, request)
        kv, fence = request.kv, self.fence
        if self.limits.groups.states:
            for blocks in (*(blocks for _, blocks in kv.pending_states), kv.fork_state_blocks):
                self.pool.release(blocks, fence)
            kv.pending_states, kv.fork_state_blocks, request.is_preempt_deferred = [], [], False
        for group, held in zip(self.limits.groups.all, kv.held, strict=True):
            # A sliding window's newest blocks are the reusable ones: they are evicted last.
            blocks = held.blocks if group.kind == "full" else held.blocks[::-1]
            self.pool.release(blocks, fence)
        self.freed_slots.append(request.slot)
        heappush(self.free_slots, request.slot)
        request.generation = self.generation = self.generation + 1
        kv.held, request.length = [], len(request.tokens)
        request.num_covered = request.planned = request.computed = request.num_unverified_drafts = 0
        request.plan_until = request.limit

    @staticmethod
    def _remove(requests: list[Request], request: Request) -> None:
        position = bisect_left(requests, request.rank, key=by_rank)
        assert requests[position] is request, (request.request_id, request.status)
        del requests[position]
