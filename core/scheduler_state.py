"""Everything the scheduler knows, and the few doors through which a request enters, leaves and ends.

Nothing here decides: `quintet.core.scheduler` and `quintet.core.commit` do.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter

from quintet.core.counters import Counters
from quintet.core.hooks import Hooks
from quintet.core.kv.groups import Groups
from quintet.core.kv.pool import BlockPool
from quintet.core.kv.prefix import extend_chain, key_of
from quintet.core.kv.prefix_tree import PrefixPaths
from quintet.core.kv_events import KvEvents
from quintet.core.request import Request, Status
from quintet.core.throughput import Throughput

by_rank = attrgetter("rank")

MAX_ENDED = 1 << 15
"""Requests that are remembered after their end: more than end while a tokenizer is replaced."""


@dataclass(slots=True, frozen=True)
class Limits:
    """The numbers that bound every step, after configuration and the executor's capacity have met."""

    num_blocks: int
    block_size: int
    num_slots: int
    max_running: int
    """At most one token each must fit into a step, or somebody would starve."""
    max_model_len: int
    max_batched: int
    watermark: int
    """Blocks that stay free when a request enters beside others, so that it is not at once their victim."""
    max_prompt: int | None
    """Longest prompt, when it must be computed in one step."""
    prefix_caching: bool
    audit: bool
    """Ship a checksum of the tables with each plan."""
    block_bytes: int
    """Of a block's keys and values, in all layers of all ranks."""
    block_copy_ns: int
    """How long copying a block between device and host takes, all ranks at the same time."""
    groups: Groups
    stages: int
    """See `quintet.wire.config.SchedulerConfig.stages`."""
    max_request_len: int
    """Most tokens one request can have when it is alone."""

    def taken_by(self, num_tokens: int) -> int:
        """Return what a request of this length takes of KV memory; see `Groups.taken_by`."""
        return num_tokens if self.groups.is_plain else int(self.groups.taken_by(num_tokens))


@dataclass(slots=True)
class InFlightPlan:
    """A plan that the executor has and the core has not committed."""

    step: int
    rows: list[Request]
    generations: list[int]
    ends: list[int]
    """Position after the last one computed, for each row."""
    samples: bytes
    num_tokens: int
    num_tenants: int
    """Slots that have one after the plan."""
    planned_ns: int


@dataclass(slots=True, frozen=True)
class RequestEnd:
    """What operators want to know of a choice that was scheduled and has ended."""

    scheduled_ns: int
    first_token_ns: int | None
    num_preemptions: int
    num_computed: int
    """Prompt tokens that it had to compute, being neither in the cache nor its elder's."""
    longest: int | None
    """Most outputs of any choice, when this was the request's last."""


@dataclass(slots=True)
class SchedulerState:
    """All requests, blocks and slots of one executor's tables."""

    limits: Limits
    hooks: Hooks
    pool: BlockPool
    live: dict[int, Request] = field(default_factory=dict)
    num_promised: int = 0
    """What the live requests take together if each reaches its limit (`Limits.taken_by`)."""
    ended: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Requests that ended last, oldest first, and at which attempt: a late second copy of one is not a new request."""
    running: list[Request] = field(default_factory=list)
    """By rank."""
    waiting: list[Request] = field(default_factory=list)
    """By rank."""
    in_flight: deque[InFlightPlan] = field(default_factory=deque)
    step: int = 0
    """The newest step planned."""
    generation: int = 0
    """The newest generation given out."""
    free_slots: list[int] = field(default_factory=list)
    """A heap: low rows are used first."""
    events: KvEvents | None = None
    """What outside routers are told of blocks; None: nothing."""
    left_slots: list[int] = field(default_factory=list)
    """Slots whose tenant left since the last plan."""
    trails: PrefixPaths = field(default_factory=PrefixPaths)
    """Which prefixes there are, for those who operate the server."""
    counters: Counters = field(default_factory=Counters)
    pace: Throughput = field(default_factory=Throughput)
    queue_times_ns: list[int] = field(default_factory=list)
    """Waits that ended since somebody last emptied this list."""
    endings: list[RequestEnd] = field(default_factory=list)
    """Likewise."""
    kept: list[Request] = field(default_factory=list)
    """Requests that left and whose clients may come back, since somebody last emptied this list."""
    untold: list[Request] = field(default_factory=list)
    """Requests that left when they lost their slots, and of whose end nobody has been told."""
    trial: frozenset[int] | None = None
    """Only these may run: it is being found out who made the executor fail. None: everybody may."""
    num_embedded: int = 0
    """Live requests whose prompt is vectors."""
    num_deferred: int = 0
    """Waiting requests that others passed in the last step: something but room keeps them."""

    def tell_of_blocks(self) -> None:
        """From now on note what outside routers are to hear of blocks."""
        self.events = KvEvents(self.limits.groups)
        self.pool.tiers.on_leave = self.events.removed

    @property
    def fence(self) -> int | None:
        """The step after which a block that is released now may get new content; None when it may at once."""
        return self.in_flight[-1].step if self.in_flight else None

    @property
    def is_waiting_for_contents(self) -> bool:
        """Whether no step is in flight and contents are on their way: so long there may be nothing to compute."""
        return not self.in_flight and self.pool.tiers.is_fetching

    @property
    def num_unpromised(self) -> int:
        """Tokens that KV memory could hold beside those; negative when it cannot hold those."""
        return self.limits.num_blocks * self.limits.block_size - self.num_promised

    def spares(self, request: Request, num_blocks: int) -> bool:
        """Whether so many blocks are available beside all that a waiting request takes when it enters."""
        groups = self.limits.groups
        needed = groups.spec.most_blocks(len(request.tokens), groups.step_tokens) + num_blocks
        return needed <= self.pool.num_available - self.limits.watermark

    def welcome(self, request: Request) -> None:
        """Take in a request that was just admitted."""
        self.live[request.request_id] = request
        self.num_promised += self.limits.taken_by(request.limit)
        self.num_embedded += request.embeds is not None
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        """Put a request that holds nothing into the queue, at its rank."""
        insort(self.waiting, request, key=by_rank)

    def enter(self, request: Request) -> None:
        """Move a request from the queue into a free slot."""
        self._remove(self.waiting, request)
        if request.scheduled_ns is None:
            request.tokens = request.tokens.copy()  # until now shared with the other choices
        self.generation += 1
        request.generation = self.generation
        request.slot = heappop(self.free_slots)
        request.status = Status.RUNNING
        insort(self.running, request, key=by_rank)

    def give_way(self, request: Request) -> None:
        """Preempt a running request; where it has states, not before the token that a step in flight draws for it is known.

        Its newest state goes on with that token. Its blocks come back no later: until then they would lie behind a fence.
        """
        if self.limits.groups.states and request.length > len(request.tokens) and not request.is_departing:
            request.is_yielding = True
        else:
            self.preempt(request)

    @property
    def num_yielding_blocks(self) -> int:
        """Blocks that come back when those that yield are preempted."""
        if not self.limits.groups.states:
            return 0
        yielding = [held for request in self.running if request.is_yielding for held in request.held]
        return sum(self.pool.refs[block] == 1 for held in yielding for block in held.blocks)

    def preempt(self, request: Request) -> None:
        """Take everything from a running request and queue it again: its ids are enough to compute it anew.

        One that is departing leaves for good: the tokens that it waited for are lost, and nobody wants them drawn again.
        """
        if request.is_departing:
            self.untold.append(request)
            self.retire(request)
            return
        if request.planned < len(request.tokens):  # otherwise it lacks the token to go on with
            self._name_end(request)
        for keep in self.hooks.keeps:
            keep(self, request)
        self._leave(request)
        request.status = Status.WAITING
        self.counters.preemptions += 1
        request.num_preemptions += 1
        self.enqueue(request)

    def retire(self, request: Request) -> None:
        """End a request. The one door: whatever it holds is released here."""
        if request.status is Status.RUNNING:
            self._name_end(request)
            self._leave(request)
        else:
            self._remove(self.waiting, request)
            self.pool.tiers.forget(request.request_id)
            if request.parent is not None:
                self.let_go_for_choices(request.parent)
        request.status = Status.ENDED
        del self.live[request.request_id]
        self.num_promised -= self.limits.taken_by(request.limit)
        self.num_embedded -= request.embeds is not None
        self.note_ended(request)
        if request.origin is not None:
            self.kept.append(request)
        first = request.parent or request
        first.num_open -= 1
        first.longest = max(first.longest, request.num_outputs)
        if request.scheduled_ns is not None:
            if self.limits.prefix_caching and request.digests:
                self.trails.add(request.digests, request.tokens if request.embeds is None else None)
            self.pace.outputs.note(request.num_outputs)
            self.endings.append(
                RequestEnd(
                    request.scheduled_ns,
                    request.first_token_ns,
                    request.num_preemptions,
                    request.num_computed,
                    None if first.num_open else first.longest,
                )
            )

    def wind_down(self, request: Request) -> bool:
        """Plan nothing more of a request that is to be kept. Returns whether it can leave now.

        Tokens that steps in flight draw are waited for, as if they were its last: none is drawn twice.
        """
        request.is_departing = True
        if request.status is not Status.RUNNING or request.length == len(request.tokens):
            return True
        taken_by = self.limits.taken_by
        self.num_promised += taken_by(request.length) - taken_by(request.limit)
        request.limit = request.length
        return False

    def publish(self, request: Request, num_tokens: int) -> None:
        """Make the full blocks among the request's first ``num_tokens`` findable; the values of these are known.

        Called when a plan computes them, not when its result is back: a block's content is fixed by then, and whoever
        finds it reads it no earlier than it is written. A reader in a later plan is executed later; one in the same
        plan stands behind the writer, and a step writes its rows' KV before it reads (`StepPlan`). A plan is executed
        whole even if its rows' requests have left since, so nothing needs to be taken back when one is preempted or
        ends; the executor alone can fail to run it, and then every block is forgotten.
        """
        block_size = self.limits.block_size
        if not self.limits.prefix_caching:
            request.register_at = request.limit + 1
            return
        num_full = num_tokens // block_size
        digests = request.digests
        extend_chain(digests, request.salt_digest, request.tokens, block_size, num_full)
        register = self.pool.index.register
        first = request.register_at // block_size - 1
        request.register_at = (num_full + 1) * block_size
        if self.events is not None:
            self.events.stored(request, first, num_full)
        if self.pool.tiers.store is not None:
            self.pool.tiers.store.stand(digests, first, num_full)
        if self.limits.groups.is_plain:
            blocks = request.held[0].blocks
            for position in range(first, num_full):
                register(digests[position], blocks[position])
            return
        for group in self.limits.groups.tokens:
            held = request.held[group]
            for position in range(max(first, held.begin), min(num_full, held.end)):
                register(key_of(digests[position], group), held.blocks[position - held.begin])
        if request.unnamed:
            self._name_states(request, num_tokens)

    def name_state(
        self, request: Request, num_tokens: int, blocks: list[int], tails: dict[int, int] | None = None
    ) -> None:
        """Make the state behind a request's first ``num_tokens``, which are known, findable: a block per group of states.

        tails: by group, the blocks that hold what is behind the last full one; where there is something.
        """
        block_size, digests, index = self.limits.block_size, request.digests, self.pool.index
        num_full, length = divmod(num_tokens, block_size)
        extend_chain(digests, request.salt_digest, request.tokens, block_size, num_full)
        before = digests[num_full - 1] if num_full else request.salt_digest
        states = dict(zip(self.limits.groups.states, blocks, strict=True))
        if length:
            tail = request.tokens[num_tokens - length : num_tokens]
            index.register_end(before, tail, states, tails or {})
            return
        for group, block in states.items():
            index.register(key_of(before, group), block)
        if self.pool.tiers.store is not None:
            self.pool.tiers.store.stand_state(digests, num_full)

    def let_go_for_choices(self, request: Request) -> None:
        """Release the state that further choices of a request begin with, if none of them waits any more."""
        if request.for_choices and not any(other.parent is request for other in self.waiting):
            self.pool.release(request.for_choices, self.fence)
            request.for_choices = []

    def _name_end(self, request: Request) -> None:
        """Make what a request with states leaves behind findable, for who goes on with its tokens: a chat's next turn.

        It is behind all that was planned, if all of that is known: the step that was planned before a stop token was known
        computed that token.
        """
        limits, planned = self.limits, request.planned
        if not (limits.groups.states and limits.prefix_caching):
            return
        if planned > len(request.tokens) or planned == request.begins_at:
            return
        if planned >= request.register_at:
            self.publish(request, planned)
        position, length = divmod(planned, limits.block_size)
        held, tails = request.held, dict[int, int]()
        if length:
            tails = {
                group: held[group].blocks[position - held[group].begin] for group in limits.groups.tokens
            }
        self.name_state(request, planned, [held[group].blocks[-1] for group in limits.groups.states], tails)

    def _name_states(self, request: Request, num_tokens: int) -> None:
        """Make states findable that were kept before all tokens behind them were known, and let go of them."""
        while request.unnamed and request.unnamed[0][0] <= num_tokens:
            length, blocks = request.unnamed.pop(0)
            self.name_state(request, length, blocks)
            self.pool.release(blocks, self.fence)

    def may_run(self, request: Request) -> bool:
        """Return whether no trial of others holds the request back."""
        return self.trial is None or request.request_id in self.trial

    def knows(self, request_id: int, attempt: int) -> bool:
        """Whether this attempt at a request, or a newer one, lives or has ended."""
        request = self.live.get(request_id)
        newest = self.ended.get(request_id) if request is None else request.attempt
        return newest is not None and newest >= attempt

    def note_ended(self, request: Request) -> None:
        """Remember that a request has ended; forget the oldest of too many."""
        self.ended[request.request_id] = request.attempt
        self.ended.move_to_end(request.request_id)
        if len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)

    def _leave(self, request: Request) -> None:
        self._remove(self.running, request)
        fence = self.fence
        if self.limits.groups.states:
            for blocks in (*(blocks for _, blocks in request.unnamed), request.for_choices):
                self.pool.release(blocks, fence)
            request.unnamed, request.for_choices, request.is_yielding = [], [], False
        for group, held in zip(self.limits.groups.all, request.held, strict=True):
            # Where a window moves on, the tail is what others can go on from: it is evicted last.
            blocks = held.blocks if group.kind == "full" else held.blocks[::-1]
            self.pool.release(blocks, fence)
        self.left_slots.append(request.slot)
        heappush(self.free_slots, request.slot)
        request.generation = self.generation = self.generation + 1
        request.held, request.length = [], len(request.tokens)
        request.room = request.planned = request.computed = 0

    @staticmethod
    def _remove(requests: list[Request], request: Request) -> None:
        position = bisect_left(requests, request.rank, key=by_rank)
        assert requests[position] is request, (request.request_id, request.status)
        del requests[position]
