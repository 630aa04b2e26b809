"""Core logic without sockets: one method per received message.

Every method returns the messages to send; none reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from quintet.core.commit import commit
from quintet.core.hooks import FEATURES, Setup, build_features, flatten
from quintet.core.invariants import check
from quintet.core.kv.pool import BlockPool
from quintet.core.kv.tiers import Tiers
from quintet.core.kv_services.kv_admin import KvAdmin
from quintet.core.kv_services.kv_events import KvEvents
from quintet.core.kv_services.kv_tier_client import KvTierClient
from quintet.core.poison_isolation import PoisonIsolation, Rejections, advance_trial, reject_poison
from quintet.core.requests.admission import AdmissionContext, admit
from quintet.core.requests.executor_limits import apply_limits, resolve_limits
from quintet.core.requests.request import Request, Status
from quintet.core.requests.resumption import RetainedRequests
from quintet.core.scheduler import schedule
from quintet.core.scheduler_state import SchedulerState
from quintet.core.token_messages import StepMessages, TokensBuilders
from quintet.process.deadlines import DeadlineHeap
from quintet.wire.config import CacheConfig, ModelConfig, SchedulerConfig
from quintet.wire.dropped import Dropped
from quintet.wire.errors import RequestError
from quintet.wire.ids import Role, epoch_tag, frontend_of, is_newer
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults
from quintet.wire.messages import Admit, Cancel, Failed, FinishReason, Resume, Resumed
from quintet.wire.step import Capacity, StepPlan, StepResult


class Engine:
    """Request life cycle and KV blocks of the core's executor.

    Requests are queued unparsed until the executor has sent its `Capacity`.
    """

    def __init__(
        self,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        features: dict[str, str] = FEATURES,
        *,
        prompt_embeds: bool = False,
    ) -> None:
        self._model = model
        self._cache = cache
        self._scheduler = scheduler
        self._hooks = flatten(
            build_features(Setup(scheduler, cache, prompt_embeds, model.pooling is not None), features)
        )
        self._early: list[Admit | Cancel] = []
        """Messages received before the capacity is known, in order."""
        self._frontends: dict[int, tuple[int, bool]] = {}
        """Newest epoch of each frontend slot, and whether that process is down."""
        self.retained = RetainedRequests(int(scheduler.resume_grace_s * 1e9))
        self.deadlines: DeadlineHeap[Request] = DeadlineHeap(lambda request: request.status is Status.ENDED)
        self.suspects = PoisonIsolation()
        self.rejections = Rejections()
        self._admission = AdmissionContext(
            model.eos_token_ids, scheduler, self.retained, self.rejections, self.deadlines
        )
        self.tier_client = KvTierClient()
        self.kv_admin = KvAdmin()
        self.state: SchedulerState | None = None
        self.executor_epoch: int | None = None
        """Epoch of the executor that holds the tables mirrored by the state."""
        self._tables = 0
        """Number of times that executor has emptied its tables (`Capacity.tables_epoch`)."""

    @property
    def live(self) -> Mapping[int, Request]:
        """Live choices by id; none before the capacity is known."""
        return {} if self.state is None else self.state.live

    @property
    def num_live(self) -> int:
        """Number of live requests (choices)."""
        if self.state is None:
            return sum(message.spec.params.n for message in self._early if isinstance(message, Admit))
        return len(self.state.live)

    @property
    def is_needed(self) -> bool:
        """True while requests are alive or retained for disconnected clients."""
        return self.num_live > 0 or self.retained.is_awaited

    def describe(self) -> str:
        """Return steps in flight and live requests as text, for the crash log."""
        state = self.state
        if state is None:
            return f"no capacity yet; {len(self._early)} messages waiting"
        steps = [flight.step for flight in state.in_flight]
        running = {request.request_id: (request.slot, request.computed) for request in state.running}
        return (
            f"steps in flight {steps}; running {{id: (slot, computed)}} {running}; {len(state.waiting)} waiting; "
            f"{self.suspects.describe()}"
        )

    def capacity(self, message: Capacity, now_ns: int) -> StepMessages:
        """Start on an executor with empty tables. Requests of the previous one are recomputed from their token ids.

        Requests of an unfinished step become suspects; see `quintet.core.poison_isolation`.
        """
        known, cache = self.executor_epoch, self._cache
        if known is not None and (message.executor_epoch, message.tables_epoch) <= (known, self._tables):
            return StepMessages()
        self.executor_epoch, self._tables = message.executor_epoch, message.tables_epoch
        limits = resolve_limits(self._model, cache, self._scheduler, message)
        before, culprit = self.state, None
        if before is not None:
            before.counters.executor_losses += 1
            culprit = self.suspects.note_failure(before.in_flight, before.live, raised=bool(message.failure))
            before.in_flight.clear()
            before.pool.tiers = Tiers()  # the lost executor's KV is gone
            for request in list(before.running):
                before.preempt(request)
            self._retain_ended(before, now_ns)
        tiers = self.tier_client.tiers(message, limits)
        pool = BlockPool(limits.num_blocks, tiers, self.kv_admin.pins)
        self.state = state = SchedulerState(
            limits, self._hooks, pool, free_slots=list(range(limits.num_slots))
        )
        self.kv_admin.begin(state)
        if cache.events is not None:
            state.events = KvEvents(limits.groups, self._model.adapters)
            tiers.evict_listener = state.events.removed
        if before is None:
            effects = StepMessages()
            for early in self._early:
                effects.add(
                    self.admit(early, now_ns)
                    if isinstance(early, Admit)
                    else self.cancel(early.request_ids, now_ns, keep=early.keep)
                )
            self._early.clear()
            return effects
        state.step, state.generation, state.counters = before.step, before.generation, before.counters
        state.queue_times_ns, state.endings = before.queue_times_ns, before.endings
        state.live, state.waiting, state.ended = before.live, before.waiting, before.ended
        state.unreported = before.unreported
        effects = apply_limits(state, now_ns)
        effects.add(self._report_ended(now_ns))
        if culprit is not None:
            effects.add(
                reject_poison(state, self.suspects, self.rejections, culprit, message.failure, now_ns)
            )
            self.suspects.advance(state.live)
        state.trial = self.suspects.trial
        return effects

    def admit(self, message: Admit, now_ns: int) -> StepMessages:
        """Queue a new request, one entry per choice (`quintet.core.requests.admission`).

        Ignores requests of a frontend that is gone.
        """
        if self._is_gone(message.request_id):
            return StepMessages()
        if self.state is None:
            self._early.append(message)
            return StepMessages()
        return admit(self._admission, self.state, message, now_ns)

    def resume(self, message: Resume, now_ns: int) -> tuple[Resumed | None, StepMessages]:
        """Return the retained request that a client claims.

        A live request is ended first, because its earlier connection is dead or superseded. Returns None while steps
        in flight still draw its last tokens: call again after the next result.
        """
        live = [request for request in self.live.values() if self.retained.is_claimed(request, message)]
        effects = self.cancel([request.request_id for request in live], now_ns, keep=True)
        if any(request.status is not Status.ENDED for request in live):
            return None, effects
        kept = self.retained.find(message.request_id, message.key)
        if kept is None:
            return Resumed(message.query_id, None), effects
        if message.rename_to:
            self.retained.rename(message.request_id, message.rename_to)
        return Resumed(message.query_id, kept.admit, kept.choices()), effects

    def cancel(self, request_ids: Iterable[int], now_ns: int, *, keep: bool = False) -> StepMessages:
        """End these requests and report each as aborted or unknown. With ``keep``, retain those that can be resumed."""
        state = self.state
        if state is None:
            self._early.append(Cancel(list(request_ids), 0, keep))
            return StepMessages()
        outbox = TokensBuilders()
        for request_id in request_ids:
            request = state.live.get(request_id)
            if request is None:
                if not keep:
                    self.retained.take(request_id)
                if request_id not in state.ended:
                    outbox.unknown.append(request_id)
                continue
            if not keep:
                request.delivery.origin = None
            elif request.delivery.origin is not None and not state.drain(request):
                continue
            outbox.end(request, FinishReason.ABORT, now_ns)
            state.retire(request)
        self._settle(now_ns)
        return outbox.effects(state.step, now_ns)

    def opened(self) -> list[tuple[int, int]]:
        """Return pairs of detokenizer and live choice, for choices that the detokenizer knows."""
        opened = [request for request in self.live.values() if request.delivery.opened]
        return [(request.detokenizer, request.request_id) for request in opened]

    def forget_moved(self, request_ids: Iterable[int], now_ns: int) -> StepMessages:
        """Forget requests that continue at another engine, including their retained state."""
        gone = set(request_ids)
        self._early = [m for m in self._early if isinstance(m, Cancel) or m.request_id not in gone]
        for request_id in gone:
            request = self.live.get(request_id)
            if request is not None:
                request.delivery.origin = None
            self.retained.take(request_id)
        return self.drop(gone, now_ns)

    def drop(self, request_ids: Iterable[int], now_ns: int) -> StepMessages:
        """End requests that have no frontend any more, without reporting it."""
        if self.state is None:
            return StepMessages()
        outbox = TokensBuilders()
        for request_id in request_ids:
            request = self.state.live.get(request_id)
            if request is not None:
                outbox.close(request)
                self.state.retire(request)
        self._settle(now_ns)
        return outbox.effects(self.state.step, now_ns)

    def end_dropped(self, dropped: Dropped, now_ns: int) -> StepMessages:
        """End the requests of a message that was dropped on its way, with an error; those of a `Cancel` as aborted."""
        if dropped.kind == Cancel.__struct_config__.tag:
            return self.cancel(dropped.request_ids, now_ns)
        state, lost = self.state, list(dropped.request_ids)
        if state is not None and state.in_flight and state.in_flight[0].step == dropped.step:
            flight = state.in_flight.popleft()
            state.pool.settle(flight.step)
            rows = zip(flight.rows, flight.generations, strict=True)
            lost += [request.request_id for request, generation in rows if request.generation == generation]
        return self.fail(lost, dropped.error(Role.CORE), now_ns)

    def fail(self, request_ids: Iterable[int], error: RequestError, now_ns: int) -> StepMessages:
        """End these requests, known or not, and all their choices with an error."""
        state, live, outbox, lost = self.state, self.live, TokensBuilders(), list(request_ids)
        firsts = {live[request_id].first_id for request_id in lost if request_id in live}
        lost += [request_id for request_id, request in live.items() if request.first_id in firsts]
        for request_id in dict.fromkeys(lost):
            request = live.get(request_id)
            if state is not None and request is not None:
                outbox.close(request)
                request.delivery.origin = None  # not retained for its client
                state.retire(request)
            outbox.failed.append(Failed(request_id, error.code, error.message))
        self._settle(now_ns)
        return outbox.effects(0 if state is None else state.step, now_ns)

    def stop_hit(self, request_ids: Iterable[int], attempts: Iterable[int], now_ns: int) -> None:
        """End these requests without reporting it: the detokenizer has found a stop string in this attempt's text."""
        state = self.state
        if state is None:
            return
        for request_id, attempt in zip(request_ids, attempts, strict=True):
            request = state.live.get(request_id)
            if request is not None and request.delivery.attempt == attempt:
                state.retire(request)
        self._settle(now_ns)

    def abandon(self, frontend: int, newest_epoch: int, now_ns: int, *, down: bool) -> None:
        """End requests of frontend epochs before ``newest_epoch``, and of that epoch too if ``down``.

        Resumable requests are retained. Requests of such a process that arrive later are ignored.
        """
        self._frontends[frontend] = (newest_epoch, down)
        self._early = [m for m in self._early if isinstance(m, Cancel) or not self._is_gone(m.request_id)]
        if self.state is not None:
            for request in list(self.state.live.values()):
                if self._is_gone(request.request_id) and (
                    request.delivery.origin is None or self.state.drain(request)
                ):
                    self.state.retire(request)
            self._settle(now_ns)

    def _is_gone(self, request_id: int) -> bool:
        """Return True when the frontend process that issued this id has ended."""
        index, epoch = frontend_of(request_id)
        if index not in self._frontends:
            return False
        newest, down = self._frontends[index]
        return down if epoch_tag(newest) == epoch else is_newer(newest, epoch)

    def plan(self, now_ns: int) -> StepPlan | None:
        """Plan a step if fewer than ``max_steps_in_flight`` are in flight and there is work."""
        state = self.state
        if state is None or len(state.in_flight) >= self._scheduler.max_steps_in_flight:
            return None
        if state.trial is not None and not advance_trial(state, self.suspects):
            return None
        if not state.live:
            return None
        state.prefix_paths.now_ns = now_ns
        plan = schedule(state, now_ns)
        if plan is None and state.trial is not None and not state.in_flight:
            self.suspects.clear()  # they wait for something that is not on trial, and that would wait for them
            state.trial = None
            plan = schedule(state, now_ns)
        self._settle(now_ns)
        if plan is not None:
            plan.tables_epoch = self._tables
        return plan

    def kv_requests(self, now_ns: int) -> list[KvTierRequests]:
        """Return the KV transfers for the executor. Called before each plan and after the last one."""
        if self.state is None or not self.state.pool.tiers.remote:
            return []
        return self.tier_client.requests(self.state, self._tables, now_ns)

    def kv_results(self, message: KvTierResults) -> None:
        """Apply results of KV transfers. Results for earlier tables are ignored; those for later ones wait for them."""
        about = (message.executor_epoch, message.tables_epoch)
        if about > (self.executor_epoch or 0, self._tables):
            self.tier_client.add_early(message)
        elif self.state is not None and about == (self.executor_epoch, self._tables):
            self.tier_client.apply(self.state, message)
            self.kv_admin.files.apply(self.state, message.files)

    def commit(self, result: StepResult, now_ns: int) -> StepMessages:
        """Apply the result of the oldest step in flight.

        Any other result is ignored: its plan was forgotten when the executor was replaced.
        """
        state = self.state
        if state is None or not state.in_flight or state.in_flight[0].step != result.step:
            return StepMessages()
        if state.trial is not None:
            self.suspects.note_step(state.in_flight[0])
        effects = commit(state, result, now_ns)
        self._settle(now_ns)
        return effects

    def expire(self, now_ns: int) -> StepMessages:
        """End requests past their deadline and drop retained requests past their TTL."""
        if self.retained.kept:
            self.retained.expire(now_ns)
        due = self.deadlines.due(now_ns) if self.deadlines.entries else []
        state = self.state
        if state is None:
            return StepMessages()
        for tier in state.pool.tiers.remote:
            tier.expire(now_ns)
        effects = self._report_ended(now_ns)
        if not due:
            return effects
        outbox = TokensBuilders()
        for request in due:
            request.delivery.origin = None
            outbox.end(request, FinishReason.ABORT, now_ns)
            state.retire(request)
        state.counters.expired += len(due)
        self._settle(now_ns)
        effects.add(outbox.effects(state.step, now_ns))
        return effects

    def _report_ended(self, now_ns: int) -> StepMessages:
        """Report as aborted the draining requests that were preempted."""
        state = self.state
        if state is None or not state.unreported:
            return StepMessages()
        outbox = TokensBuilders()
        for request in state.unreported:
            outbox.end(request, FinishReason.ABORT, now_ns)
        state.unreported.clear()
        return outbox.effects(state.step, now_ns)

    def _retain_ended(self, state: SchedulerState, now_ns: int) -> None:
        """Retain ended requests for clients that may reconnect."""
        for request in state.retained:
            self.retained.add(request, now_ns)
        state.retained.clear()

    def _settle(self, now_ns: int) -> None:
        """Retain ended requests, and check the invariants if the configuration enables it. Called after every change."""
        state = self.state
        if state is None:
            return
        if state.retained:
            self._retain_ended(state, now_ns)
        if self._scheduler.audit:
            check(state)
