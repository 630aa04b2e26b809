"""From the times of a job to its figures, alike for every engine, and from the machine's limits to what they allow.

decode_tok_s        tokens after the first, over the time from the first to the last: prefill excluded
prompt_tok_s        prompt tokens over the time to the first token
output_tok_s        all tokens generated over the whole duration
ttft_p50_s          from sending a request to its first token, median over requests
inter_token_p99_s   between successive tokens of a request, 99th percentile over all
duration_s          from the first request to the end of the last
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bench.peers.dimensions import DIMENSIONS, Dimensions
from bench.peers.jobs import Job, JobResult
from bench.peers.limits import Limits
from bench.peers.workload import GGUF_FILES, Precision, Row

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


def impossible(row: Row, job: Job, figures: Mapping[str, float], limits: Limits) -> str:
    """Return what is better than the machine can do, in words; an empty string where nothing is."""
    for figure in row.figures:
        limit = limit_of(row, figure.key, job, limits)
        value = figures.get(figure.key)
        if limit is None or value is None:
            continue
        if value > limit if figure.higher_is_better else value < limit:
            return (
                f"{figure.key} {value:,.2f} is beyond the limit measured beside it, {limit:,.2f}: "
                "something was not computed, or others had the machine while the limit was measured"
            )
    return ""


def limit_of(row: Row, key: str, job: Job, limits: Limits) -> float | None:
    """Return the best that figure ``key`` of a job can be; `None` where nothing bounds it or the rate is not known."""
    shape = DIMENSIONS[row.model]
    if key == "decode_tok_s":
        return bandwidth_limit(shape, row.precision, limits) if limits.read_gb_s else None
    if key not in ("prompt_tok_s", "output_tok_s", "duration_s") or not _multiply_rate(row.precision, limits):
        return None
    seconds = multiply_limit(shape, row.precision, job, limits)
    tokens = {"prompt_tok_s": len(job.prompts[0]), "output_tok_s": job.total_output}
    return tokens[key] / seconds if key in tokens else seconds


def bandwidth_limit(shape: Dimensions, precision: Precision, limits: Limits) -> float:
    """Return tokens per second of one stream if reading every weight once were all it took."""
    linear, head = _linear_weights(shape), shape.vocab_size * shape.hidden
    if precision in GGUF_FILES:
        return limits.read_gb_s / limits.weights_gb
    per_linear = {"bf16": 2.0, "int8": 1.0, "w8a8": 1.0, "int4": 0.5 + 2 / _INT4_GROUP}[precision]
    per_head = 2.0 if precision == "bf16" else 1.0
    return limits.read_gb_s * 1e9 / (linear * per_linear + head * per_head)


def multiply_limit(shape: Dimensions, precision: Precision, job: Job, limits: Limits) -> float:
    """Return the seconds of ``job`` if multiplying at the machine's peak rate were all it took.

    That rate is the matrix unit's where there is one. bf16 may be widened to fp32 first, for nothing here: on some
    processors those multiply-adds are the faster ones.

    Every prompt token passes every linear layer and attends to those before it, a beginning that all prompts share does so once;
    logits are computed where a token is drawn.
    """
    linear, head = _linear_weights(shape), shape.vocab_size * shape.hidden
    shared = _shared_beginning(job.prompts) if len(job.prompts) > 1 else 0
    tokens, attended = shared, _attended(shared)
    for prompt, output_len in zip(job.prompts, job.output_lens, strict=True):
        length = len(prompt) + output_len - 1
        tokens += length - shared
        attended += _attended(length) - _attended(shared)
    attention = 2 * 2 * attended * shape.heads * shape.head_dim * shape.layers
    operations = 2 * tokens * linear + 2 * job.total_output * head + attention
    return operations / (_multiply_rate(precision, limits) * 1e9)


def _shared_beginning(prompts: Sequence[list[int]]) -> int:
    first, last = min(prompts), max(prompts)  # whatever all of them begin with, these two do
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


def _attended(length: int) -> int:
    return length * (length + 1) // 2


def _multiply_rate(precision: Precision, limits: Limits) -> float:
    return fastest(precision, limits)[1]


def fastest(precision: Precision, limits: Limits) -> tuple[str, float]:
    """Return what multiplies fastest for these weights, and its rate: shares of a multiply limit are of that."""
    rates = {"8-bit dot products": limits.int8_gop_s, "the 8-bit matrix unit": limits.int8_matrix_gop_s}
    rounds_inputs = precision == "w8a8" or precision in GGUF_FILES  # of a file's weights llama.cpp does
    if not rounds_inputs:
        rates = {
            "bf16 dot products": limits.bf16_gflop_s,
            "fp32 multiply-adds": limits.fp32_gflop_s,
            "the bf16 matrix unit": limits.bf16_matrix_gflop_s,
        }
    return max(rates.items(), key=lambda each: each[1])


def _linear_weights(shape: Dimensions) -> int:
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    return shape.layers * (attention + 3 * shape.hidden * shape.width)
