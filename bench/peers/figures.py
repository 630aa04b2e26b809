"""From the times of a job to its figures, alike for every engine, and from the machine's limits to what they allow.

decode_tok_s        tokens after the first, over the time from the first to the last: prefill excluded
prompt_tok_s        prompt tokens over the time to the first token
output_tok_s        all tokens generated over the whole duration
ttft_p50_s          from sending a request to its first token, median over requests
inter_token_p99_s   between successive tokens of a request, 99th percentile over all
duration_s          from the first request to the end of the last
"""

from __future__ import annotations

import numpy as np

from bench.peers.jobs import Job, JobResult
from bench.peers.limits import Limits
from bench.peers.models import Shape
from bench.peers.workload import Precision

_INT4_GROUP = 32
"""Weights that share a two-byte scale in llama.cpp's 4-bit format, the reference for what four bits must read."""


def figures_of(job: Job, result: JobResult) -> dict[str, float]:
    """Return the figures of a finished job. Raises `ValueError` where a request came back short."""
    for served, asked in zip(result.served, job.output_lens, strict=True):
        if served.num_tokens != asked:
            raise ValueError(f"a request of {asked} tokens came back with {served.num_tokens}")
    figures = {
        "duration_s": result.duration_s,
        "output_tok_s": job.total_output / result.duration_s,
    }
    timed = [served for served in result.served if served.token_times_s]
    if not timed:
        return figures
    firsts_s = [served.token_times_s[0] - served.start_s for served in timed]
    figures["ttft_p50_s"] = float(np.median(firsts_s))
    gaps_s = np.concatenate([np.diff(served.token_times_s) for served in timed])
    if gaps_s.size:
        figures["inter_token_p99_s"] = float(np.percentile(gaps_s, 99))
    if len(timed) == 1:
        figures["prompt_tok_s"] = len(job.prompts[0]) / firsts_s[0]
        if gaps_s.size:
            figures["decode_tok_s"] = gaps_s.size / float(gaps_s.sum())
    return figures


def bandwidth_limit(shape: Shape, precision: Precision, limits: Limits) -> float:
    """Return tokens per second of one stream if reading every weight once were all it took."""
    linear, head = _linear_weights(shape), shape.vocab_size * shape.hidden
    per_linear = {"bf16": 2.0, "int8": 1.0, "w8a8": 1.0, "int4": 0.5 + 2 / _INT4_GROUP}[precision]
    per_head = 2.0 if precision == "bf16" else 1.0
    return limits.read_gb_s * 1e9 / (linear * per_linear + head * per_head)


def multiply_limit(shape: Shape, precision: Precision, job: Job, limits: Limits) -> float:
    """Return the seconds of ``job`` if multiplying at the machine's peak rate were all it took.

    bf16 may be widened to fp32 first, for nothing here: on some processors those multiply-adds are the faster ones.

    Every prompt token passes every linear layer and attends to those before it; logits are computed where a token is drawn.
    """
    linear, head = _linear_weights(shape), shape.vocab_size * shape.hidden
    tokens, attended = 0, 0
    for prompt, output_len in zip(job.prompts, job.output_lens, strict=True):
        length = len(prompt) + output_len - 1
        tokens += length
        attended += length * (length + 1) // 2
    attention = 2 * 2 * attended * shape.heads * shape.head_dim * shape.layers
    operations = 2 * tokens * linear + 2 * job.total_output * head + attention
    rate = limits.int8_gop_s if precision == "w8a8" else max(limits.bf16_gflop_s, limits.fp32_gflop_s)
    return operations / (rate * 1e9)


def _linear_weights(shape: Shape) -> int:
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.intermediate)
