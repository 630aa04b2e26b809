"""Measure rows with alternating engines (A B A B) and the machine's limits before each round; append each result to the records.

A figure above the limit of its round is an error: a prefix cache hit, or other load while the limit was measured.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path

from bench.peers import foreign_load
from bench.peers.engines import processes
from bench.peers.engines.interface import Contender, EngineFailed, Home, Setup
from bench.peers.figures import figures_of, limit_error
from bench.peers.limits import Limits, build_probe, measure_limits
from bench.peers.measurement_lock import MeasurementLock
from bench.peers.records import MACHINE, Record, append_record, measured, read_records, this_commit
from bench.peers.running_engines import RunningEngines
from bench.peers.token_bytes import token_bytes
from bench.peers.workload import GGUF_FILES, Row, job_of, warm_up_of


@dataclass(frozen=True, slots=True)
class Plan:
    """Measurements to take."""

    rows: Sequence[Row]
    engines: Sequence[Contender]
    repetitions: int
    home: Home
    raw: Path
    """File of the records; a resumed run appends to it."""
    lock: MeasurementLock
    foreign_share: float
    """A measurement is repeated if other programs use a larger share of the CPU time."""
    tries: int
    """Maximum number of tries; the one with the smallest share is kept."""


def measure(plan: Plan) -> list[Record]:
    """Take all measurements of the plan that have no record; return the failures."""
    failures: list[Record] = []
    done = set(measured(read_records(plan.raw)))
    total = len(plan.rows) * plan.repetitions
    with RunningEngines(plan.home) as running, contextlib.closing(plan.lock):
        for index, (row, repetition) in enumerate(_rounds(plan)):
            engines = [engine for engine in plan.engines if engine.runs(row)]
            missing = [engine for engine in engines if (row.id, engine.name, repetition) not in done]
            if not missing:
                continue
            print(f"[{index + 1}/{total}] {row.words}, repetition {repetition + 1}", flush=True)
            machine = _record(plan, row, MACHINE, repetition, partial(_limits, plan, row))
            limits = Limits.of(machine.figures)
            for engine in missing:
                take = partial(_figures, plan, running, engine, row, repetition, limits)
                record = _record(plan, row, engine.name, repetition, take)
                if record.error:
                    failures.append(record)
    return failures


def _rounds(plan: Plan) -> Iterator[tuple[Row, int]]:
    """Yield rows and repetitions, grouped by setup, so that engines start once per setup."""
    by_setup: dict[tuple[Setup, bool], list[Row]] = {}
    for row in plan.rows:
        by_setup.setdefault((_setup(row), row.pattern == "boot"), []).append(row)
    for rows in by_setup.values():
        for row in rows:
            for repetition in range(plan.repetitions):
                yield row, repetition


def _setup(row: Row) -> Setup:
    return Setup(row.model, row.precision, row.mode, row.engines, row.flags)


def _record(plan: Plan, row: Row, name: str, repetition: int, take: Callable[[], dict[str, float]]) -> Record:
    plan.lock.release_if_due()
    plan.lock.acquire()
    at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    record = Record(row.id, name, repetition, at, commit=this_commit())
    try:
        record.figures = take()
    except (EngineFailed, ValueError) as error:
        record.error = str(error)
    append_record(plan.raw, record)
    shown = {figure.key for figure in row.figures} | {"foreign_share"}
    if name == MACHINE:
        shown |= {each.name for each in fields(Limits) if each.name.endswith("_s")}
    words = "  ".join(f"{key} {value:,.2f}" for key, value in record.figures.items() if key in shown)
    print(f"    {name:<10} {words or record.error}", flush=True)
    return record


def _limits(plan: Plan, row: Row) -> dict[str, float]:
    program = build_probe(plan.home.folder)
    is_file = row.precision in GGUF_FILES
    weights_gb = token_bytes(plan.home.gguf(row.model, row.precision)) / 1e9 if is_file else 0.0

    def take(attempt: int) -> dict[str, float]:
        limits = replace(measure_limits(program, plan.home.threads), weights_gb=weights_gb)
        return {key: float(value) for key, value in asdict(limits).items()}

    return _undisturbed(plan, take)


def _figures(
    plan: Plan, engines: RunningEngines, engine: Contender, row: Row, repetition: int, limits: Limits
) -> dict[str, float]:
    """Return the figures of an engine. Raises `EngineFailed`, and `ValueError` for a figure beyond its limit."""
    setup = _setup(row)
    try:
        if row.pattern == "boot":
            return _undisturbed(plan, partial(_boot, plan, engines, engine, row, repetition))
        loaded = engines.get(engine, setup)
        if loaded is None:
            began_s = time.perf_counter()
            loaded = engines.start(engine, setup)
            print(f"    {engine.name:<10} started in {time.perf_counter() - began_s:.1f} s", flush=True)
        if engines.needs_warm_up(engine, row):
            loaded.run(warm_up_of(row))
        running = loaded

        def take(attempt: int) -> dict[str, float]:
            job = job_of(row, repetition, attempt)
            figures = figures_of(job, running.run(job))
            cause = limit_error(row, job, figures, limits)
            if cause:
                raise ValueError(cause)
            return figures

        return _undisturbed(plan, take)
    except EngineFailed:
        engines.stop(engine.name)
        raise


def _boot(
    plan: Plan, engines: RunningEngines, engine: Contender, row: Row, repetition: int, attempt: int
) -> dict[str, float]:
    """Measure an engine's start without other engines: time from spawn to first token, then its memory (PSS)."""
    engines.stop_all()
    setup = _setup(row)
    _read_into_page_cache(engine.model_path(plan.home, setup))
    began_s = time.perf_counter()
    running = engines.start(engine, setup)
    running.run(job_of(row, repetition, attempt))
    boot_s = time.perf_counter() - began_s
    return {"boot_s": boot_s, "pss_gb": running.pss_bytes() / 1e9}


def _undisturbed(plan: Plan, take: Callable[[int], dict[str, float]]) -> dict[str, float]:
    """Repeat a measurement until other programs use little CPU time; return the least disturbed figures.

    ``take`` gets the number of the try, since each try needs new prompts.
    """
    own = partial(processes.family, os.getpid())
    best: dict[str, float] | None = None
    for attempt in range(plan.tries):
        if attempt:
            foreign_load.pause()
        is_last = attempt == plan.tries - 1
        if not is_last and not foreign_load.is_quiet(own, plan.foreign_share):
            continue
        meter = foreign_load.ForeignMeter(own)
        figures = take(attempt)
        figures["foreign_share"] = meter.share()
        if best is None or figures["foreign_share"] < best["foreign_share"]:
            best = figures
        if best["foreign_share"] <= plan.foreign_share:
            break
    assert best is not None, plan.tries
    return best


def _read_into_page_cache(path: Path) -> None:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    for file in files:
        with file.open("rb") as opened:
            while opened.read(16 << 20):
                pass
