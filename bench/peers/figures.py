"""Compute the figures of a job from its times, and their limits from the machine's rates.

decode_tok_s        output tokens after the first one, divided by the time from first to last token: without prefill
prompt_tok_s        prompt tokens divided by the time to first token
output_tok_s        output tokens of all requests divided by the job's duration
ttft_p50_s          median time to first token
inter_token_p99_s   99th percentile of the time between successive tokens of a request
duration_s          time from the first request to the end of the last one
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bench.peers.dimensions import DIMENSIONS, Dimensions
from bench.peers.jobs import Job, JobResult
from bench.peers.limits import Limits
from bench.peers.workload import GGUF_FILES, Precision, Row

_INT4_GROUP = 32
"""Weights per two-byte scale in llama.cpp's 4-bit format, the reference for the bytes of 4-bit weights."""


def figures_of(job: Job, result: JobResult) -> dict[str, float]:
    """Return the figures of a finished job. Raises `ValueError` if a request has too few tokens."""
    for served, output_len in zip(result.served, job.output_lens, strict=True):
        if served.num_tokens != output_len:
            raise ValueError(f"a request for {output_len} tokens returned {served.num_tokens}")
    figures = {
        "duration_s": result.duration_s,
        "output_tok_s": job.total_output / result.duration_s,
    }
    timed = [served for served in result.served if served.token_times_s]
    if not timed:
        return figures
    ttfts_s = [served.token_times_s[0] - served.start_s for served in timed]
    figures["ttft_p50_s"] = float(np.median(ttfts_s))
    gaps_s = np.concatenate([np.diff(served.token_times_s) for served in timed])
    if gaps_s.size:
        figures["inter_token_p99_s"] = float(np.percentile(gaps_s, 99))
    if len(timed) == 1:
        figures["prompt_tok_s"] = len(job.prompts[0]) / ttfts_s[0]
        if gaps_s.size:
            figures["decode_tok_s"] = gaps_s.size / float(gaps_s.sum())
    return figures


def limit_error(row: Row, job: Job, figures: Mapping[str, float], limits: Limits) -> str:
    """Return a message if a figure exceeds its limit, else an empty string."""
    for figure in row.figures:
        limit = limit_of(row, figure.key, job, limits)
        value = figures.get(figure.key)
        if limit is None or value is None:
            continue
        if value > limit if figure.higher_is_better else value < limit:
            return (
                f"{figure.key} {value:,.2f} exceeds the limit of this round, {limit:,.2f}: the engine skipped work "
                "(prefix cache), or other programs disturbed the measurement of the limit"
            )
    return ""


def limit_of(row: Row, key: str, job: Job, limits: Limits) -> float | None:
    """Return the limit of a figure of a job; `None` if it has no limit or the machine's rate is not known."""
    shape = DIMENSIONS[row.model]
    if key == "decode_tok_s":
        return bandwidth_limit(shape, row.precision, limits) if limits.read_gb_s else None
    if key not in ("prompt_tok_s", "output_tok_s", "duration_s") or not _multiply_rate(row.precision, limits):
        return None
    seconds = multiply_limit(shape, row.precision, job, limits)
    tokens = {"prompt_tok_s": len(job.prompts[0]), "output_tok_s": job.total_output}
    return tokens[key] / seconds if key in tokens else seconds


def bandwidth_limit(shape: Dimensions, precision: Precision, limits: Limits) -> float:
    """Return tokens per second of one stream if each token takes the time to read all weights once."""
    linear, head = _linear_weights(shape), shape.vocab_size * shape.hidden
    if precision in GGUF_FILES:
        return limits.read_gb_s / limits.weights_gb
    per_linear = {"bf16": 2.0, "int8": 1.0, "w8a8": 1.0, "int4": 0.5 + 2 / _INT4_GROUP}[precision]
    per_head = 2.0 if precision == "bf16" else 1.0
    return limits.read_gb_s * 1e9 / (linear * per_linear + head * per_head)


def multiply_limit(shape: Dimensions, precision: Precision, job: Job, limits: Limits) -> float:
    """Return the seconds of ``job`` if it takes the time of its multiplications at the machine's peak rate.

    That rate is the matrix unit's if there is one. For bf16 it may be that of fp32 multiply-adds, which are faster on some
    processors; the conversion is not counted.

    Each prompt token passes all linear layers and attends to the tokens before it. A prefix that all prompts share is computed
    once. Logits are computed for sampled tokens only.
    """
    linear, head = _linear_weights(shape), shape.vocab_size * shape.hidden
    shared = _shared_prefix_len(job.prompts) if len(job.prompts) > 1 else 0
    tokens, attended = shared, _attended(shared)
    for prompt, output_len in zip(job.prompts, job.output_lens, strict=True):
        length = len(prompt) + output_len - 1
        tokens += length - shared
        attended += _attended(length) - _attended(shared)
    attention = 2 * 2 * attended * shape.heads * shape.head_dim * shape.layers
    operations = 2 * tokens * linear + 2 * job.total_output * head + attention
    return operations / (_multiply_rate(precision, limits) * 1e9)


def _shared_prefix_len(prompts: Sequence[list[int]]) -> int:
    first, last = min(prompts), max(prompts)  # a common prefix of these two is common to all
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


def _attended(length: int) -> int:
    return length * (length + 1) // 2


def _multiply_rate(precision: Precision, limits: Limits) -> float:
    return fastest(precision, limits)[1]


def fastest(precision: Precision, limits: Limits) -> tuple[str, float]:
    """Return the name and rate of the fastest instructions for these weights, which define the multiply limit."""
    rates = {"8-bit dot products": limits.int8_gop_s, "the 8-bit matrix unit": limits.int8_matrix_gop_s}
    quantizes_activations = (
        precision == "w8a8" or precision in GGUF_FILES
    )  # llama.cpp quantizes the activations of GGUF files
    if not quantizes_activations:
        rates = {
            "bf16 dot products": limits.bf16_gflop_s,
            "fp32 multiply-adds": limits.fp32_gflop_s,
            "the bf16 matrix unit": limits.bf16_matrix_gflop_s,
        }
    return max(rates.items(), key=lambda each: each[1])


def _linear_weights(shape: Dimensions) -> int:
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.width)
