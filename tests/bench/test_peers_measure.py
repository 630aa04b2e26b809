"""Measurement loop of the comparison: repetition after disturbances, and rejected results."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from bench.peers import foreign_load
from bench.peers import measure as measuring
from bench.peers.engines.interface import Home, Running, Setup
from bench.peers.figures import limit_error
from bench.peers.jobs import Job, JobResult, Served
from bench.peers.limits import Limits, build_probe, measure_limits
from bench.peers.measure import Plan, measure
from bench.peers.measurement_lock import MeasurementLock
from bench.peers.records import MACHINE, Machine, Report, measured, read_records
from bench.peers.table import markdown
from bench.peers.workload import ROWS, Row, job_of

LIMITS = Limits(2, 40.0, 908.0, 500.0, 1880.0)


@dataclass
class CachingEngine:
    """Engine with a prefix cache: repeated prompts take almost no time."""

    name: str = "Quintet"
    prompt_s: float = 4.0
    seen: list[list[int]] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)

    def runs(self, row: Row) -> bool:
        return True

    def is_installed(self, home: Home) -> bool:
        return True

    def versions(self, home: Home) -> dict[str, str]:
        return {}

    def model_path(self, home: Home, setup: Setup) -> Path:
        return home.folder

    def memory_bytes(self, setup: Setup) -> int:
        return 0

    def start(self, home: Home, setup: Setup) -> Running:
        return self

    def run(self, job: Job) -> JobResult:
        self.jobs.append(job)
        served = []
        for prompt, output_len in zip(job.prompts, job.output_lens, strict=True):
            first_s = 0.07 if prompt in self.seen else self.prompt_s
            self.seen.append(prompt)
            served.append(Served(0.0, [first_s + 0.1 * i for i in range(output_len)], output_len))
        return JobResult(self.prompt_s, served)

    def pss_bytes(self) -> int:
        return 0

    def stop(self) -> None:
        pass


@pytest.fixture
def disturbed_by(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], None]:
    """Disturb each measurement of an engine by a share of the machine, and its limits by none."""

    def script(shares: Sequence[float]) -> None:
        remaining_shares = itertools.chain([0.0], shares)  # the limits are measured first

        class ScriptedMeter:
            def __init__(self, own: object) -> None:
                pass

            def share(self) -> float:
                return next(remaining_shares)

        monkeypatch.setattr(foreign_load, "ForeignMeter", ScriptedMeter)
        monkeypatch.setattr(foreign_load, "is_quiet", lambda own, allowed: True)
        monkeypatch.setattr(foreign_load, "pause", lambda: None)
        monkeypatch.setattr(measuring, "build_probe", lambda home: home / "limits")
        monkeypatch.setattr(measuring, "measure_limits", lambda program, threads: LIMITS)

    return script


def test_disturbed_measurement_is_repeated_with_uncached_ids(
    tmp_path: Path, disturbed_by: Callable[[Sequence[float]], None]
) -> None:
    disturbed_by([0.5, 0.3, 0.0])
    engine = CachingEngine()
    assert measure(_plan(tmp_path, engine, "prompt-S-bf16")) == []
    warm, *tries = engine.jobs
    assert len(tries) == 3
    prefixes = {tuple(job.prompts[0][:16]) for job in (warm, *tries)}
    assert len(prefixes) == 4
    assert {len(job.prompts[0]) for job in tries} == {2048}
    records = measured(read_records(tmp_path / "raw.jsonl"))
    assert records["prompt-S-bf16", "Quintet", 0].figures["prompt_tok_s"] == 2048 / 4.0


def test_machine_limits_include_the_matrix_unit(
    tmp_path: Path,
    disturbed_by: Callable[[Sequence[float]], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    disturbed_by([0.0])
    limits = replace(LIMITS, bf16_matrix_gflop_s=4070.0, int8_matrix_gop_s=7600.0)
    monkeypatch.setattr(measuring, "measure_limits", lambda program, threads: limits)
    assert measure(_plan(tmp_path, CachingEngine(), "prompt-S-bf16")) == []
    (output,) = [line for line in capsys.readouterr().out.splitlines() if line.split()[0] == MACHINE]
    rates = "read_gb_s 40.00  bf16_gflop_s 908.00  fp32_gflop_s 500.00  int8_gop_s 1,880.00"
    assert f"{rates}  bf16_matrix_gflop_s 4,070.00  int8_matrix_gop_s 7,600.00" in output


@pytest.mark.whole  # compiles, and takes seconds of every core
def test_probe_is_compiled_once_and_measures(tmp_path: Path) -> None:
    program = build_probe(tmp_path / "home")
    found = measure_limits(program, 1)
    assert found.threads == 1 and found.read_gb_s > 0 and found.fp32_gflop_s > 0
    times = program.stat().st_mtime_ns
    assert build_probe(tmp_path / "home").stat().st_mtime_ns == times


def test_result_beyond_its_limit_is_an_error(
    tmp_path: Path, disturbed_by: Callable[[Sequence[float]], None]
) -> None:
    disturbed_by([0.0])
    plan = _plan(tmp_path, CachingEngine(prompt_s=0.067), "prompt-S-bf16")
    (failure,) = measure(plan)
    assert failure.error.startswith("prompt_tok_s 30,567.16 exceeds the limit of this round, 1,129")
    assert failure.figures == {}
    records = read_records(tmp_path / "raw.jsonl")
    assert ("prompt-S-bf16", "Quintet", 0) not in measured(records)
    assert ("prompt-S-bf16", MACHINE, 0) in measured(records)
    report = Report("2026-01-01", Machine("a processor", 2, 1 << 34, "Linux", "3.11"), 2, {}, records)
    words = markdown(report, ROWS, ["Quintet"])
    assert "30,567.16" not in words.partition("Not counted:")[0]
    assert "one 2 048-token prompt, Quintet, repetition 1: prompt_tok_s 30,567.16" in words

    disturbed_by([0.0])
    again = Plan(**{**_fields(plan), "engines": [CachingEngine()]})
    assert measure(again) == []
    assert ("prompt-S-bf16", "Quintet", 0) in measured(read_records(tmp_path / "raw.jsonl"))


@pytest.mark.parametrize(
    ("row_id", "key", "just_possible", "impossible_value"),
    [
        ("stream-S-bf16", "decode_tok_s", 40.4, 40.6),
        ("prompt-S-w8a8", "prompt_tok_s", 2300.0, 2400.0),
        ("clients8-S-bf16", "output_tok_s", 232.0, 233.0),
        ("prefix-S-bf16", "duration_s", 2.4, 2.3),
    ],
)
def test_machine_limits(row_id: str, key: str, just_possible: float, impossible_value: float) -> None:
    row = next(row for row in ROWS if row.id == row_id)
    job = job_of(row, 0)
    assert limit_error(row, job, {key: just_possible}, LIMITS) == ""
    assert key in limit_error(row, job, {key: impossible_value}, LIMITS)


def test_no_limit_without_the_instruction() -> None:
    row = next(row for row in ROWS if row.id == "prompt-S-w8a8")
    without = Limits(2, 40.0, 0.0, 500.0, 0.0)
    assert limit_error(row, job_of(row, 0), {"prompt_tok_s": 1e9}, without) == ""


def _plan(folder: Path, engine: CachingEngine, row_id: str) -> Plan:
    rows = [row for row in ROWS if row.id == row_id]
    home = Home(folder, 2, 4096, 1 << 30)
    return Plan(rows, [engine], 1, home, folder / "raw.jsonl", MeasurementLock(None, 0.0), 0.05, 4)


def _fields(plan: Plan) -> dict[str, object]:
    return {name: getattr(plan, name) for name in Plan.__dataclass_fields__}
