"""Prometheus counters of KV transfers: by back end and event, and between device and host."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.wire.kv_tiers import TierName
from quintet.wire.metrics import CounterSeries, Metrics


def transfer_counters(metrics: Metrics) -> Iterator[tuple[tuple[TierName, str], CounterSeries]]:
    """Yield the counters of KV back ends, by key of `Counters.transfers`."""
    tiers: dict[tuple[TierName, str], dict[str, tuple[str, str]]] = {
        ("disk", "KV blocks on disk"): {
            "stored_objects": ("stored", "written"),
            "unstored_objects": ("unstored", "not written because the disk is slow or full"),
            "fetched_blocks": ("fetched", "read"),
            "missed_blocks": ("missed", "requested, but absent or damaged"),
        },
        ("peer", "KV blocks between servers"): {
            "offered_blocks": ("offered", "copied for other servers to fetch"),
            "fetched_blocks": ("fetched", "received from another server"),
            "missed_blocks": ("missed", "requested from another server, but not received or damaged"),
        },
        ("store", "KV blocks of the shared store"): {
            "fetched_blocks": ("fetched", "received"),
            "missed_blocks": ("missed", "requested, and not received or incomplete"),
        },
    }
    for (tier, blocks), events in tiers.items():
        help = (
            f"{blocks}, by event: {', '.join(f'{event} ({meaning})' for event, meaning in events.values())}."
        )
        for name, (event, _) in events.items():
            yield (tier, name), metrics.counter(f"kv_{tier}_blocks", help, event=event)
        for event in ("stored", "fetched") if tier == "disk" else ("fetched",):
            bytes_moved = metrics.counter(f"kv_{tier}_bytes", f"Bytes of {blocks}, by event.", event=event)
            yield (tier, f"{event}_bytes"), bytes_moved
    help = (
        "Chunks of KV blocks for the shared store, by event: stored (or already present), unstored (the store is full, "
        "slow or unreachable)."
    )
    for event in ("stored", "unstored"):
        yield ("store", f"{event}_objects"), metrics.counter("kv_store_chunks", help, event=event)


def swap_counters(metrics: Metrics) -> Iterator[tuple[str, CounterSeries]]:
    """Yield the counters of copies between device and host."""
    blocks, num_bytes = "KV blocks copied between device and host.", "Bytes copied between device and host."
    for name in ("out", "in"):
        yield f"swap_{name}_blocks", metrics.counter("kv_swap_blocks", blocks, direction=name)
        yield f"swap_{name}_bytes", metrics.counter("kv_swap_bytes", num_bytes, direction=name)
