"""The core's figures, by the names operators know."""

from __future__ import annotations

from quintet.core.load import load_of
from quintet.core.state import State
from quintet.wire.metrics import COUNT_BUCKETS, CounterSeries, Metrics

S = 1e-9


class CoreMetrics:
    """Every series of the process, made once at boot."""

    def __init__(self, metrics: Metrics) -> None:
        gauge, counter, histogram = metrics.gauge, metrics.counter, metrics.histogram
        self.running = gauge("num_requests_running", "Requests that hold a slot.")
        self.waiting = gauge("num_requests_waiting", "Requests that wait for a slot, blocks or budget.")
        self.kv_usage = gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        self._counters: tuple[tuple[str, CounterSeries], ...] = (
            ("preemptions", counter("num_preemptions", "Requests that lost their blocks to another.")),
            ("prefix_queries", counter("prefix_cache_queries", "Tokens looked up in the prefix cache.")),
            ("prefix_hits", counter("prefix_cache_hits", "Tokens found in the prefix cache.")),
            ("prompt_tokens", counter("prompt_tokens", "Prompt tokens of the requests that were scheduled.")),
            ("generation_tokens", counter("generation_tokens", "Tokens drawn for requests.")),
        )
        self.step_tokens = histogram("iteration_tokens_total", "Tokens computed in one step.", COUNT_BUCKETS)
        self.queue = histogram("request_queue_time_seconds", "From arrival to the first step planned.")
        self.hop_in = histogram(
            "hop_seconds", "From a process sending to another receiving.", hop="tokenizer_core"
        )
        self.hop_result = histogram(
            "hop_seconds", "From a process sending to another receiving.", hop="executor_core"
        )
        self.plan = histogram("core_plan_seconds", "Planning, encoding and sending one step.")
        self.commit = histogram("core_commit_seconds", "Applying one step's result and sending its tokens.")

    def note_state(self, state: State) -> None:
        """Bring gauges and counters up to the state."""
        load = load_of(state)
        self.running.set(load.num_running)
        self.waiting.set(load.num_waiting)
        self.kv_usage.set(load.kv_usage)
        for name, series in self._counters:
            series.value = getattr(state.counters, name)
        for waited_ns in state.queue_times_ns:
            self.queue.observe(waited_ns * S)
        state.queue_times_ns.clear()
