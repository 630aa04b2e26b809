"""Client of the executor's KV back ends: opens their core halves, collects requests, applies and counts results.

Policy is in `quintet.core.kv.tier` and `quintet.core.features.kv_connector`.
"""

from __future__ import annotations

from collections.abc import Iterator

from quintet.core import recurrent_state
from quintet.core.counters import Counters
from quintet.core.kv.tier import Tier
from quintet.core.kv.tiers import BACK_ENDS, EVENTS, Tiers
from quintet.core.scheduler_state import Limits, SchedulerState
from quintet.wire.kv_tiers import KvTierRequests, KvTierResults, TierCapacity, TierName
from quintet.wire.metrics import CounterSeries, Metrics
from quintet.wire.step import Capacity


class KvTierClient:
    """Collects the contents of an executor's back ends until its `Capacity` arrives."""

    def __init__(self) -> None:
        self._early: list[KvTierResults] = []

    def add_early(self, results: KvTierResults) -> None:
        """Add contents at start."""
        about = results.executor_epoch, results.tables_epoch
        self._early = [early for early in self._early if (early.executor_epoch, early.tables_epoch) == about]
        self._early.append(results)

    def tiers(self, capacity: Capacity, limits: Limits) -> Tiers:
        """Return the back ends of an executor's tables, with their contents at start."""
        first, num_host_blocks, tiers = 0, capacity.num_host_blocks, list[Tier]()
        host = [TierCapacity("host", num_host_blocks, num_host_blocks)] if num_host_blocks else []
        for each in (*host, *capacity.tiers):
            kind = BACK_ENDS[each.tier]
            tiers.append(kind(limits.groups, recurrent_state.CHECKPOINT_EVERY, first, each))
            first += each.num_staging_blocks
        about = capacity.executor_epoch, capacity.tables_epoch
        for early in self._early:
            for tier in tiers:
                if tier.name == early.tier and (early.executor_epoch, early.tables_epoch) == about:
                    tier.hold(early.stored)
        self._early.clear()
        return Tiers(tiers)

    def requests(self, state: SchedulerState, tables_epoch: int, now_ns: int) -> list[KvTierRequests]:
        """Return the transfers to send. Called before each plan is made, and after the last one was sent."""
        remote, block_of = state.pool.tiers.remote, state.pool.index.block_of
        taken_ns = now_ns + _busy_ns(state) if remote else now_ns
        made = [tier.requests(tables_epoch, block_of, taken_ns) for tier in remote]
        requests = [each for each in made if each is not None]
        for each in requests:
            num_blocks = sum(len(store.keys) for store in each.stores)
            state.counters.transfers[each.tier, "offered_blocks"] += num_blocks
        return requests

    def apply(self, state: SchedulerState, results: KvTierResults) -> None:
        for tier in state.pool.tiers.remote:
            if tier.name == results.tier:
                tier.apply(results)
        _count(state.counters, results, state.limits.block_bytes)


def _busy_ns(state: SchedulerState) -> int:
    """Return the time for which a computing executor may not process transfers; it extends the timeouts."""
    if not state.in_flight:
        return 0
    num_tokens = sum(sum(flight.counts) for flight in state.in_flight)
    return state.throughput.time_of(num_tokens + state.limits.max_batched) or 0


def _count(counters: Counters, results: KvTierResults, block_bytes: int) -> None:
    """Add results to the counters of their back end."""
    tier, num_fetched = results.tier, len(results.fetched) // 4
    numbers = {
        "stored_objects": len(results.stored),
        "unstored_objects": len(results.unstored),
        "fetched_blocks": num_fetched,
        "missed_blocks": len(results.missed) // 4,
        "stored_bytes": len(results.stored) * block_bytes,
        "fetched_bytes": num_fetched * block_bytes,
    }
    for name, number in numbers.items():
        counters.transfers[tier, name] += number


def transfer_counters(metrics: Metrics) -> Iterator[tuple[tuple[TierName, str], CounterSeries]]:
    """Yield the counters of KV back ends, by key of `Counters.transfers`."""
    for (tier, noun, what), events in EVENTS.items():
        meanings = ", ".join(f"{event} ({meaning})" for event, meaning in events.items())
        for event in events:
            name = f"{event}_objects" if event in ("stored", "unstored") else f"{event}_blocks"
            help = f"{what}, by event: {meanings}."
            yield (tier, name), metrics.counter(f"kv_{tier}_{noun}", help, event=event)
            if noun == "blocks" and event in ("stored", "fetched"):
                help = f"Bytes of {what}, by event."
                yield (tier, f"{event}_bytes"), metrics.counter(f"kv_{tier}_bytes", help, event=event)


def swap_counters(metrics: Metrics) -> Iterator[tuple[str, CounterSeries]]:
    """Yield the counters of copies between device and host."""
    blocks, num_bytes = "KV blocks copied between device and host.", "Bytes copied between device and host."
    for name in ("out", "in"):
        yield f"swap_{name}_blocks", metrics.counter("kv_swap_blocks", blocks, direction=name)
        yield f"swap_{name}_bytes", metrics.counter("kv_swap_bytes", num_bytes, direction=name)
