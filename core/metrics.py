"""Prometheus metrics of the core."""

from __future__ import annotations

from quintet.core.kv_services.kv_tier_client import swap_counters, transfer_counters
from quintet.core.scheduler_state import Limits, RequestEnd, SchedulerState
from quintet.wire.metrics import COUNT_BUCKETS, CounterSeries, GaugeSeries, Metrics

S = 1e-9

COUNTERS = {
    "num_drafts": ("spec_decode_num_drafts", "Rows of steps that verified draft tokens."),
    "num_draft_tokens": ("spec_decode_num_draft_tokens", "Draft tokens that were verified."),
    "num_accepted_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
    "preemptions": ("num_preemptions", "Requests that lost their blocks to another."),
    "prefix_queries": ("prefix_cache_queries", "Tokens looked up in the prefix cache."),
    "prefix_hits": ("prefix_cache_hits", "Tokens found in the prefix cache."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens of the requests that were scheduled."),
    "prompt_tokens_cached": ("prompt_tokens_cached", "Prompt tokens found in the prefix cache."),
    "generation_tokens": ("generation_tokens", "Generated tokens."),
    "expired": ("expired_requests", "Choices that passed their deadline before they ended."),
    "executor_losses": ("executor_losses", "Executors that died, and steps that raised."),
    "poison_requests": ("poison_requests", "Poison requests: they made the executor fail."),
}
"""Field of `Counters` -> name and description of its metric."""


class CoreMetrics:
    """All metric series of the process, created at start."""

    def __init__(self, metrics: Metrics, role: str = "", max_drafts: int = 1) -> None:
        """role: in disaggregated serving (``--role``); "" for none. max_drafts: of a request in a step."""
        gauge, counter, histogram = metrics.gauge, metrics.counter, metrics.histogram
        if role:
            help = "Role of this server in disaggregated prefill and decode; always 1."
            gauge("kv_peers_info", help, duty=role).set(1)
        self.running = gauge("num_requests_running", "Requests that hold a slot.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for a slot, blocks or budget.")
        help = "Waiting requests, by reason: capacity (slots, blocks, budget), or deferred while others pass."
        self.waiting_for_capacity = gauge("num_requests_waiting_by_reason", help, reason="capacity")
        self.deferred = gauge("num_requests_waiting_by_reason", help, reason="deferred")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        rejected = "Requests rejected on admission, by reason."
        self._counters: tuple[tuple[str, CounterSeries], ...] = (
            *swap_counters(metrics),
            *((field, counter(name, help)) for field, (name, help) in COUNTERS.items()),
            ("deadline_rejections", counter("admission_rejections", rejected, reason="deadline")),
            ("poison_rejections", counter("admission_rejections", rejected, reason="poison")),
        )
        self._transfers = tuple(transfer_counters(metrics))
        name = "spec_decode_num_accepted_tokens_per_pos"
        help = "Draft tokens that were accepted, by position from 0."
        self._accepted = [counter(name, help, position=str(position)) for position in range(max_drafts)]
        self.step_tokens = histogram(
            "iteration_tokens_total", "Prompt and generated tokens per step.", COUNT_BUCKETS
        )
        self.queue = histogram("request_queue_time_seconds", "Time from arrival to the first planned step.")
        self.prefill = histogram(
            "request_prefill_time_seconds", "Time from the first planned step to the first token, per choice."
        )
        self.decode = histogram(
            "request_decode_time_seconds", "Time from the first token to the end, per choice."
        )
        self.inference = histogram(
            "request_inference_time_seconds", "Time from the first planned step to the end, per choice."
        )
        self.request_preemptions = histogram(
            "request_num_preemptions", "Preemptions per choice.", (0, *COUNT_BUCKETS)
        )
        self.prefill_computed = histogram(
            "request_prefill_kv_computed_tokens",
            "Computed (not cached) prompt tokens per choice.",
            (0, *COUNT_BUCKETS),
        )
        self.longest = histogram(
            "request_max_num_generation_tokens",
            "Generated tokens of a request's longest choice.",
            (0, *COUNT_BUCKETS),
        )
        self.request_state_mismatches = counter(
            "request_state_mismatches", "Requests open in only one of two processes, twice in a row."
        )
        self._gauge = gauge
        self._cache: GaugeSeries | None = None
        self.hop_in = histogram(
            "hop_seconds", "Time of a message from sender to receiver.", hop="tokenizer_core"
        )
        self.hop_result = histogram(
            "hop_seconds", "Time of a message from sender to receiver.", hop="executor_core"
        )
        self.plan = histogram("core_plan_seconds", "Time to plan, encode and send one step.")
        self.commit = histogram("core_commit_seconds", "Time to apply a step's result and send its tokens.")

    def note_limits(self, limits: Limits) -> None:
        """Set the KV memory limits as labels of an info gauge."""
        labels = {
            "block_size": str(limits.block_size),
            "num_gpu_blocks": str(limits.num_blocks),
            "enable_prefix_caching": str(limits.prefix_caching),
        }
        if self._cache is None:
            self._cache = self._gauge("cache_config_info", "KV memory configuration, in labels; always 1.")
            self._cache.set(1)
        self._cache.labels = tuple(labels.items())

    def note_state(self, state: SchedulerState) -> None:
        """Update gauges and counters from the state, before a scrape."""
        num_waiting, pool = len(state.waiting), state.pool
        self.running.set(len(state.running))
        self.waiting.set(num_waiting)
        num_deferred = min(state.num_deferred, num_waiting)
        self.waiting_for_capacity.set(num_waiting - num_deferred)
        self.deferred.set(num_deferred)
        self.kv_usage.set(pool.num_used / pool.num_blocks if pool.num_blocks else 0.0)
        for name, series in self._counters:
            series.value = getattr(state.counters, name)
        for series, value in zip(self._accepted, state.counters.num_accepted_tokens_per_pos, strict=False):
            series.value = value
        for transfer, series in self._transfers:
            series.value = state.counters.transfers[transfer]

    def note_endings(self, state: SchedulerState, now_ns: int) -> None:
        """Observe queue times and ended choices since the last call."""
        for waited_ns in state.queue_times_ns:
            self.queue.observe(waited_ns * S)
        state.queue_times_ns.clear()
        for ending in state.endings:
            self._note_ending(ending, now_ns)
        state.endings.clear()

    def _note_ending(self, ending: RequestEnd, now_ns: int) -> None:
        stats = ending.stats
        if stats.scheduled_ns is not None:
            self.inference.observe(max(0, now_ns - stats.scheduled_ns) * S)
            if stats.first_token_ns is not None:
                self.prefill.observe(max(0, stats.first_token_ns - stats.scheduled_ns) * S)
                self.decode.observe(max(0, now_ns - stats.first_token_ns) * S)
        self.request_preemptions.observe(stats.num_preemptions)
        self.prefill_computed.observe(stats.num_computed)
        if ending.longest is not None:
            self.longest.observe(ending.longest)
