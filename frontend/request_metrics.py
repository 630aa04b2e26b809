"""Metrics of the requests of a frontend: client-side latencies, endings and parameters."""

from __future__ import annotations

from quintet.wire.messages import Finish, FinishReason, Submit
from quintet.wire.metrics import COUNT_BUCKETS, PACE_BUCKETS_S, Metrics
from quintet.wire.params import SamplingParams

NS = 1e-9


class RequestMetrics:
    """The series of `quintet.frontend.live_requests`."""

    def __init__(self, metrics: Metrics) -> None:
        self.hop = metrics.histogram(
            "hop_seconds", "Time of a message from sender to receiver.", hop="detokenizer_frontend"
        )
        self.time_to_first_token = metrics.histogram(
            "time_to_first_token_seconds", "Arrival of the request to its first token, at the frontend."
        )
        self.inter_token_latency = metrics.histogram(
            "inter_token_latency_seconds",
            "Time between two deliveries of tokens of one choice.",
            PACE_BUCKETS_S,
        )
        self.time_per_output_token = metrics.histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first, per choice."
        )
        self.latency = metrics.histogram(
            "e2e_request_latency_seconds", "Arrival of the request to the end of the choice."
        )
        self.prompt_tokens = metrics.histogram(
            "request_prompt_tokens", "Prompt tokens of a request.", COUNT_BUCKETS
        )
        self.generation_tokens = metrics.histogram(
            "request_generation_tokens", "Tokens generated for a choice.", COUNT_BUCKETS
        )
        self.params_n = metrics.histogram("request_params_n", "The parameter n of requests.", COUNT_BUCKETS)
        self.params_max_tokens = metrics.histogram(
            "request_params_max_tokens", "The parameter max_tokens of requests that set it.", COUNT_BUCKETS
        )
        self.success = {
            reason: metrics.counter(
                "request_success", "Choices that ended, by reason.", finished_reason=reason.name.lower()
            )
            for reason in FinishReason
            if reason
        }
        self.live = metrics.gauge("live_requests", "Live requests of this frontend.")
        self.resumed = metrics.counter("resumed_streams", "Streams resumed by their clients.")
        self.duplicate_endings = metrics.counter(
            "duplicate_endings", "Endings of choices that had already ended; ignored."
        )
        self.stale_deltas = metrics.counter(
            "stale_deltas", "Duplicate deltas, and deltas of choices that had ended; ignored."
        )

    def submitted(self, params: SamplingParams) -> None:
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)

    def choice_ended(
        self, submit: Submit, finish: Finish, num_tokens: int, first_token_ns: int, now_ns: int
    ) -> None:
        self.success[finish.reason if finish.reason in self.success else FinishReason.ERROR].inc()
        self.latency.observe((now_ns - submit.spec.arrival_ns) * NS)
        self.generation_tokens.observe(num_tokens)
        if num_tokens > 1 and first_token_ns:
            self.time_per_output_token.observe((now_ns - first_token_ns) * NS / (num_tokens - 1))
