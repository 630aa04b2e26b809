"""The core's figures, by the names operators know."""

from __future__ import annotations

from collections.abc import Iterator

from quintet.core.scheduler_state import Limits, RequestEnd, SchedulerState
from quintet.wire.metrics import COUNT_BUCKETS, CounterSeries, GaugeSeries, Metrics

S = 1e-9


def _disk_counters(metrics: Metrics) -> Iterator[tuple[str, CounterSeries]]:
    """Yield what is counted of blocks on disk, by its name in `quintet.core.counters`."""
    for name, what in (
        ("stored", "written"),
        ("unstored", "not written, the disk being too slow or full"),
        ("fetched", "read"),
        ("missed", "asked for, and not there or not whole"),
    ):
        help = f"KV blocks on disk, by what became of them; {name}: {what}."
        yield f"disk_{name}_blocks", metrics.counter("kv_disk_blocks", help, event=name)
    for name in ("stored", "fetched"):
        yield f"disk_{name}_bytes", metrics.counter("kv_disk_bytes", "Bytes of these blocks.", event=name)


def _peer_counters(metrics: Metrics) -> Iterator[tuple[str, CounterSeries]]:
    """Yield what is counted of blocks of other servers, likewise."""
    for name, what in (
        ("offered", "copied for other servers to fetch"),
        ("fetched", "come from another server"),
        ("missed", "asked of another server, and not come, or not whole"),
    ):
        help = f"KV blocks between servers, by what became of them; {name}: {what}."
        yield f"peer_{name}_blocks", metrics.counter("kv_peer_blocks", help, event=name)
    bytes_fetched = metrics.counter("kv_peer_bytes", "Bytes of these blocks.", event="fetched")
    yield "peer_fetched_bytes", bytes_fetched


def _store_counters(metrics: Metrics) -> Iterator[tuple[str, CounterSeries]]:
    """Yield what is counted of the shared store, likewise."""
    for name, what in (
        ("kept", "there now"),
        ("unkept", "not there: the store is full, slow or out of reach"),
    ):
        help = f"Runs of KV blocks for the shared store, by what became of them; {name}: {what}."
        yield f"store_{name}_runs", metrics.counter("kv_store_runs", help, event=name)
    for name, what in (("fetched", "come"), ("missed", "asked for, and not come, or not whole")):
        help = f"KV blocks of the shared store, by what became of them; {name}: {what}."
        yield f"store_{name}_blocks", metrics.counter("kv_store_blocks", help, event=name)
    bytes_fetched = metrics.counter("kv_store_bytes", "Bytes of these blocks.", event="fetched")
    yield "store_fetched_bytes", bytes_fetched


class CoreMetrics:
    """Every series of the process, made once at boot."""

    def __init__(self, metrics: Metrics, role: str = "") -> None:
        """role: what the server does of requests that two servers compute; "" for nothing."""
        gauge, counter, histogram = metrics.gauge, metrics.counter, metrics.histogram
        if role:
            help = "What this server does of requests that two servers compute; always 1."
            gauge("kv_peers_info", help, duty=role).set(1)
        self.running = gauge("num_requests_running", "Requests that hold a slot.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for a slot, blocks or budget.")
        help = "Waiting requests, by what they wait for: room (capacity), or something else while others pass (deferred)."
        self.waiting_for_room = gauge("num_requests_waiting_by_reason", help, reason="capacity")
        self.deferred = gauge("num_requests_waiting_by_reason", help, reason="deferred")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        self._counters: tuple[tuple[str, CounterSeries], ...] = (
            *_disk_counters(metrics),
            *_peer_counters(metrics),
            *_store_counters(metrics),
            ("preemptions", counter("num_preemptions", "Requests that lost their blocks to another.")),
            (
                "swap_out_blocks",
                counter("kv_swap_blocks", "KV blocks copied between device and host.", direction="out"),
            ),
            (
                "swap_in_blocks",
                counter("kv_swap_blocks", "KV blocks copied between device and host.", direction="in"),
            ),
            ("swap_out_bytes", counter("kv_swap_bytes", "Bytes of these blocks.", direction="out")),
            ("swap_in_bytes", counter("kv_swap_bytes", "Bytes of these blocks.", direction="in")),
            ("prefix_queries", counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")),
            ("prefix_hits", counter("prefix_cache_hits", "Tokens found in the prefix cache.")),
            ("prompt_tokens", counter("prompt_tokens", "Prompt tokens of the requests that were scheduled.")),
            (
                "prompt_tokens_cached",
                counter("prompt_tokens_cached", "Of these, tokens found in the prefix cache."),
            ),
            ("generation_tokens", counter("generation_tokens", "Tokens drawn for requests.")),
            ("expired", counter("expired_requests", "Choices whose deadline passed before they ended.")),
            (
                "hopeless",
                counter("admission_rejections", "Requests refused at the door.", reason="deadline"),
            ),
            ("executor_losses", counter("executor_losses", "Executors that died, and steps that raised.")),
            ("convictions", counter("requests_convicted", "Requests that made the executor fail.")),
            (
                "refusals",
                counter("admission_rejections", "Requests refused at the door.", reason="poison"),
            ),
        )
        self.step_tokens = histogram(
            "iteration_tokens_total",
            "Tokens of prompts computed in one step, and tokens drawn.",
            COUNT_BUCKETS,
        )
        self.queue = histogram("request_queue_time_seconds", "From arrival to the first step planned.")
        self.prefill = histogram(
            "request_prefill_time_seconds", "From the first step planned to the first token, per choice."
        )
        self.decode = histogram(
            "request_decode_time_seconds", "From the first token to the ending, per choice."
        )
        self.inference = histogram(
            "request_inference_time_seconds", "From the first step planned to the ending, per choice."
        )
        self.request_preemptions = histogram(
            "request_num_preemptions", "How often a choice was preempted.", (0, *COUNT_BUCKETS)
        )
        self.prefill_computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens that a choice had to compute.",
            (0, *COUNT_BUCKETS),
        )
        self.longest = histogram(
            "request_max_num_generation_tokens",
            "Tokens drawn for the longest choice of a request.",
            (0, *COUNT_BUCKETS),
        )
        self.audit_differences = counter(
            "audit_differences", "Requests that two processes did not agree on, twice in a row."
        )
        self._gauge = gauge
        self._cache: GaugeSeries | None = None
        self.hop_in = histogram(
            "hop_seconds", "From a process sending to another receiving.", hop="tokenizer_core"
        )
        self.hop_result = histogram(
            "hop_seconds", "From a process sending to another receiving.", hop="executor_core"
        )
        self.plan = histogram("core_plan_seconds", "Planning, encoding and sending one step.")
        self.commit = histogram("core_commit_seconds", "Applying one step's result and sending its tokens.")

    def note_limits(self, limits: Limits) -> None:
        """Show what KV memory there is, as labels of a gauge that is always 1."""
        labels = {
            "block_size": str(limits.block_size),
            "num_gpu_blocks": str(limits.num_blocks),
            "enable_prefix_caching": str(limits.prefix_caching),
        }
        if self._cache is None:
            self._cache = self._gauge("cache_config_info", "KV memory; the labels are what it tells.")
            self._cache.set(1)
        self._cache.labels = tuple(labels.items())

    def note_state(self, state: SchedulerState) -> None:
        """Bring gauges and counters up to the state: when they are to be told."""
        num_waiting, pool = len(state.waiting), state.pool
        self.running.set(len(state.running))
        self.waiting.set(num_waiting)
        num_deferred = min(state.num_deferred, num_waiting)
        self.waiting_for_room.set(num_waiting - num_deferred)
        self.deferred.set(num_deferred)
        self.kv_usage.set(pool.num_used / pool.num_blocks if pool.num_blocks else 0.0)
        for name, series in self._counters:
            series.value = getattr(state.counters, name)

    def note_endings(self, state: SchedulerState, now_ns: int) -> None:
        """Count the waits and requests that ended since the last time: they ended now."""
        for waited_ns in state.queue_times_ns:
            self.queue.observe(waited_ns * S)
        state.queue_times_ns.clear()
        for ending in state.endings:
            self._note_ending(ending, now_ns)
        state.endings.clear()

    def _note_ending(self, ending: RequestEnd, now_ns: int) -> None:
        self.inference.observe(max(0, now_ns - ending.scheduled_ns) * S)
        if ending.first_token_ns is not None:
            self.prefill.observe(max(0, ending.first_token_ns - ending.scheduled_ns) * S)
            self.decode.observe(max(0, now_ns - ending.first_token_ns) * S)
        self.request_preemptions.observe(ending.num_preemptions)
        self.prefill_computed.observe(ending.num_computed)
        if ending.longest is not None:
            self.longest.observe(ending.longest)
