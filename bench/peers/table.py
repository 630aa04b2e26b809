"""Write the table of a run: medians over repetitions, the machine's limits, and ratios to the best peer and to the limit."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from bench.peers.figures import fastest, limit_of
from bench.peers.limits import Limits
from bench.peers.records import MACHINE, Record, Report, failed
from bench.peers.workload import Figure, Row, job_of

OURS = "Quintet"


def markdown(report: Report, rows: Sequence[Row], engines: Sequence[str]) -> str:
    """Return the table with a heading: date, machine, versions and limits.

    "times the best peer" is above 1 if Quintet is better, also for figures where less is better.
    """
    peers = [name for name in engines if name != OURS]
    columns = ["work", OURS, *peers, "limit", "times the best peer", "share of limit", "must reach"]
    lines = [*_heading(report), "", "| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for row in rows:
        records = [record for record in report.records if record.row == row.id]
        if not any(record.figures for record in records if record.engine != MACHINE):
            continue
        lines += [_line(row, figure, records, peers) for figure in row.figures]
    lines += _failures(failed(report.records), rows)
    return "\n".join(lines) + "\n"


def _heading(report: Report) -> list[str]:
    limits = _limits(report.records)
    machine = report.machine
    commits = sorted({record.commit for record in report.records if record.engine == OURS})
    versions = "; ".join(
        f"{engine}: " + ", ".join(f"{name} {version}" for name, version in packages.items())
        for engine, packages in report.versions.items()
    )
    lines = [
        f"{report.date}, {machine.cpu}, {machine.cores} cores, {machine.memory_bytes / 2**30:.0f} GiB, "
        f"{report.threads} threads for every engine. Quintet at {', '.join(commits) or 'no commit'}.",
        "",
        f"{versions}.",
    ]
    if limits:
        ranges = (
            ("read bandwidth", [one.read_gb_s for one in limits], "GB/s"),
            ("bf16 dot products", [one.bf16_gflop_s for one in limits], "GFLOP/s"),
            ("fp32 multiply-adds", [one.fp32_gflop_s for one in limits], "GFLOP/s"),
            ("8-bit dot products", [one.int8_gop_s for one in limits], "GOP/s"),
            ("bf16 in the matrix unit", [one.bf16_matrix_gflop_s for one in limits], "GFLOP/s"),
            ("8-bit in the matrix unit", [one.int8_matrix_gop_s for one in limits], "GOP/s"),
        )
        words = "; ".join(
            f"{name} {median(values):,.0f} {unit} ({min(values):,.0f}–{max(values):,.0f})"
            for name, values, unit in ranges
        )
        bf16, eight = fastest("bf16", limits[0])[0], fastest("w8a8", limits[0])[0]
        lines += [
            "",
            f"Limits measured in turn with the engines, median (range): {words}. Shares: of read bandwidth for one stream; "
            f"otherwise of {bf16}, for w8a8 and GGUF files of {eight}.",
        ]
    return lines


def _line(row: Row, figure: Figure, records: Sequence[Record], peers: Sequence[str]) -> str:
    values = {name: _median(records, name, figure.key) for name in (OURS, *peers)}
    known_peers = [value for name, value in values.items() if name != OURS and value is not None]
    ours = values[OURS]
    ratio, share = "–", "–"
    if ours is not None and known_peers:
        best = max(known_peers) if figure.higher_is_better else min(known_peers)
        ratio = f"{ours / best if figure.higher_is_better else best / ours:.2f}"
    limit = _limit(row, figure, records)
    if ours is not None and limit is not None:
        share = f"{100 * ours / limit:.0f} %"
    name = f"{row.words}: {figure.words}" if figure.words else row.words
    cells = [f"{name}, {figure.unit}", *(_cell(value, figure) for value in values.values())]
    return "| " + " | ".join([*cells, _cell(limit, figure), ratio, share, figure.goal or "–"]) + " |"


def _limit(row: Row, figure: Figure, records: Sequence[Record]) -> float | None:
    if not figure.shows_limit:
        return None
    job = job_of(row, 0)
    all_limits = (limit_of(row, figure.key, job, limits) for limits in _limits(records))
    known = [limit for limit in all_limits if limit is not None]
    return median(known) if known else None


def _limits(records: Sequence[Record]) -> list[Limits]:
    return [Limits.of(record.figures) for record in records if record.engine == MACHINE and record.figures]


def _failures(records: Sequence[Record], rows: Sequence[Row]) -> list[str]:
    """Return the list of failed measurements and their errors."""
    words = {row.id: row.words for row in rows}
    lines = [
        f"* {words[record.row]}, {record.engine}, repetition {record.repetition + 1}: {record.error}."
        for record in records
        if record.row in words
    ]
    return ["", "Not counted:", "", *lines] if lines else []


def _median(records: Sequence[Record], engine: str, key: str) -> float | None:
    newest = {record.repetition: record for record in records if record.engine == engine and not record.error}
    values = [record.figures[key] for record in newest.values() if key in record.figures]
    return median(values) if values else None


def _cell(value: float | None, figure: Figure) -> str:
    return "–" if value is None else f"{value:,.{figure.digits}f}".replace(",", " ")
