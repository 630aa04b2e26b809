"""Comparison with other engines: jobs, and rates computed from times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from bench.peers.dimensions import DIMENSIONS
from bench.peers.drivers.closed_loop import run_closed_loop
from bench.peers.figures import bandwidth_limit, fastest, figures_of, multiply_limit
from bench.peers.jobs import Job, JobResult, Served, decode_job, decode_result, encode_job, encode_result
from bench.peers.limits import Limits
from bench.peers.records import MACHINE, Machine, Record, Report, append_record, measured, read_records
from bench.peers.table import markdown
from bench.peers.workload import ROWS, Row, job_of, warm_up_of

LIMITS = Limits(2, 40.0, 908.0, 500.0, 1880.0)


class FakeStepper:
    """Engine that generates one token per request and step, and records the maximum number of active requests."""

    def __init__(self) -> None:
        self.max_active = 0
        self._remaining: dict[int, int] = {}

    def add(self, request: int, prompt: Sequence[int], output_len: int) -> None:
        self._remaining[request] = output_len

    def step(self) -> list[int]:
        self.max_active = max(self.max_active, len(self._remaining))
        progressed = list(self._remaining)
        self._remaining = {request: left - 1 for request, left in self._remaining.items() if left > 1}
        return progressed


def test_closed_loop_keeps_one_request_per_client_in_flight() -> None:
    job = Job([[1]] * 7, [3, 1, 2, 5, 1, 1, 4], clients=3, context_len=8)
    engine = FakeStepper()
    result = run_closed_loop(job, engine)
    assert [served.num_tokens for served in result.served] == job.output_lens
    assert engine.max_active == 3


def test_rates_exclude_the_documented_parts() -> None:
    job = Job([[1] * 100], [5], 1, 128)
    result = JobResult(3.0, [Served(10.0, [12.0, 12.25, 12.5, 12.75, 13.0], 5)])
    figures = figures_of(job, result)
    assert figures["prompt_tok_s"] == 50.0
    assert figures["decode_tok_s"] == 4.0
    assert figures["output_tok_s"] == pytest.approx(5 / 3)


def test_short_output_is_rejected() -> None:
    job = Job([[1, 2]], [5], 1, 128)
    with pytest.raises(ValueError, match="5 tokens returned 4"):
        figures_of(job, JobResult(1.0, [Served(0.0, [], 4)]))


def test_limits_of_the_published_shapes() -> None:
    s_tokens_s = 2048 / multiply_limit(DIMENSIONS["S"], "bf16", job_of(_row("prompt-S-bf16"), 0), LIMITS)
    assert round(s_tokens_s) == 1129
    assert round(bandwidth_limit(DIMENSIONS["S"], "bf16", LIMITS), 1) == 40.5


def test_matrix_unit_raises_the_limit() -> None:
    matrices = replace(LIMITS, bf16_matrix_gflop_s=2 * LIMITS.bf16_gflop_s, int8_matrix_gop_s=7000.0)
    job = job_of(_row("prompt-S-bf16"), 0)
    with_unit, without = (
        multiply_limit(DIMENSIONS["S"], "bf16", job, limits) for limits in (matrices, LIMITS)
    )
    assert with_unit == without / 2
    assert fastest("bf16", matrices)[0] == "the bf16 matrix unit"
    assert fastest("w8a8", matrices) == ("the 8-bit matrix unit", 7000.0)
    assert fastest("q4_k_m", matrices) == ("the 8-bit matrix unit", 7000.0), (
        "llama.cpp quantizes the inputs of a file"
    )
    assert Limits.of(asdict(LIMITS)) == LIMITS


def test_repetitions_share_lengths_but_no_prompt() -> None:
    row = _row("offline-S-bf16")
    first, second, warm = job_of(row, 0), job_of(row, 1), warm_up_of(row)
    assert first.output_lens == second.output_lens
    assert all(a != b for a, b in zip(first.prompts, second.prompts, strict=True))
    assert all(prompt not in first.prompts for prompt in warm.prompts)
    assert job_of(row, 0) == first


def test_jobs_and_results_survive_the_pipe() -> None:
    job = Job([[1, 2], [3]], [4, 5], 2, 64)
    result = JobResult(1.5, [Served(0.0, [0.5, 1.0], 2)])
    assert decode_job(encode_job(job)) == job
    assert decode_result(encode_result(result)) == result


def test_interrupted_run_loses_its_last_line_only(tmp_path: Path) -> None:
    path = tmp_path / "raw.jsonl"
    kept = Record("stream-S-bf16", "Quintet", 0, "2026-01-01T00:00:00+00:00", {"decode_tok_s": 30.0})
    failed = Record("stream-S-bf16", "vLLM", 0, "2026-01-01T00:00:00+00:00", error="no")
    append_record(path, kept)
    append_record(path, failed)
    with path.open("ab") as file:
        file.write(b'{"row":"stream-S-b')
    assert read_records(path) == [kept, failed]
    assert list(measured(read_records(path))) == [("stream-S-bf16", "Quintet", 0)]


def test_table_has_medians_and_the_best_peer() -> None:
    def record(engine: str, repetition: int, value: float) -> Record:
        return Record(
            "stream-S-bf16", engine, repetition, "2026-01-01T00:00:00+00:00", {"decode_tok_s": value}
        )

    limits = {
        "threads": 2.0,
        "read_gb_s": 40.0,
        "bf16_gflop_s": 900.0,
        "fp32_gflop_s": 1.0,
        "int8_gop_s": 1.0,
    }
    records = [
        Record("stream-S-bf16", MACHINE, 0, "2026-01-01T00:00:00+00:00", limits),
        *(record("Quintet", i, value) for i, value in enumerate((10.0, 36.0, 90.0))),
        *(record("A", i, value) for i, value in enumerate((30.0, 30.0, 31.0))),
        *(record("B", i, value) for i, value in enumerate((20.0, 20.0, 20.0))),
    ]
    report = Report("2026-01-01", Machine("a processor", 2, 1 << 34, "Linux", "3.11"), 2, {}, records)
    line = markdown(report, ROWS, ["Quintet", "A", "B"]).splitlines()[-1]
    assert [cell.strip() for cell in line.split("|")[2:8]] == ["36.0", "30.0", "20.0", "40.5", "1.20", "89 %"]


def _row(row_id: str) -> Row:
    return next(row for row in ROWS if row.id == row_id)
