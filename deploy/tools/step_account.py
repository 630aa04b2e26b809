"""Analysis of trace spans: time per step and process, and its overlap with the executor's computation.

A step lasts from the start of one plan in the executor to the start of the next. ``process/trace.py`` records spans,
``bench/timeline`` draws them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import msgspec

from quintet.process.trace import SPANS, SUFFIX, Trace, read_trace
from quintet.wire.errors import ConfigError

COMPUTE = ("tables", "arrays", "layers", "logits", "sampling")
"""Spans in which the executor computes, and with which all other work should overlap."""
WAITING = ("wait", "bubble")
"""Spans in which an executor process is idle."""


@dataclass(frozen=True, slots=True, order=True)
class Bar:
    """One span of one process. Times are on the machine's monotonic clock."""

    begin_ns: int
    end_ns: int
    process: str
    """``executor-0``; further processes of an executor are ``executor-0 stage 1``, ``executor-0 rank 3``."""
    name: str
    number: int

    @property
    def role(self) -> str:
        """Process role; ``stage 1`` or ``rank 3`` for further processes of an executor."""
        slot, _, part = self.process.partition(" ")
        return part or slot.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    begin_ns: int
    end_ns: int
    """Start of the next step."""


@dataclass(frozen=True, slots=True)
class Row:
    """Time of one kind of span."""

    role: str
    name: str
    ms: float
    """Median per step, summed over all spans of this name in the step."""
    share: float
    """Share of the median step."""
    hidden: float
    """Share of its time that overlaps with computation of the executor."""


@dataclass(frozen=True, slots=True)
class ProcessPart:
    """Utilization of one process of an executor with several processes."""

    process: str
    computed: float
    """Share of time spent computing."""
    waited: float
    """Share of time waiting for another stage or for work: the bubble."""


@dataclass(frozen=True, slots=True)
class StepAccount:
    num_steps: int
    step_ms: float
    rows: list[Row]
    parts: list[ProcessPart]
    """Empty for an executor with one process."""
    all_s: float
    """Duration of all steps."""

    def text(self) -> str:
        lines = [
            f"step: {self.step_ms:.3f} ms (median of {self.num_steps})",
            f"{'process':<12} {'span':<11} {'ms per step':>11} {'share':>8} {'overlap with computation':>25}",
        ]
        for row in self.rows:
            overlap = f"{row.hidden:.0%}" if row.role != "executor" else ""
            lines.append(f"{row.role:<12} {row.name:<11} {row.ms:>11.3f} {row.share:>8.2%} {overlap:>25}")
        if self.parts:
            lines.append(f"\n{f'of {self.all_s:.3f} s':<24} {'computed':>10} {'waited':>8}")
        lines += [f"{part.process:<24} {part.computed:>10.1%} {part.waited:>8.1%}" for part in self.parts]
        return "\n".join(lines)


def read_folder(folder: Path) -> list[Trace]:
    """Read the traces of a server's processes. Raises `ConfigError`."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise ConfigError(
            f"{folder} contains no *{SUFFIX} files; run the server with --trace {folder}, and stop it: processes write their "
            "traces at exit"
        )
    try:
        return [read_trace(path) for path in paths]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{folder} contains a file that is not a trace of this version: {error}") from None


def bars_of(trace: Trace) -> list[Bar]:
    """Return all spans of a trace, sorted by start time."""
    titles = {e.pid: str(e.args["name"]) for e in trace.traceEvents if e.name == "process_name"}
    return sorted(
        Bar(
            round(event.ts * 1e3),
            round((event.ts + event.dur) * 1e3),
            titles[event.pid],
            event.name,
            int(event.args[SPANS[event.name][0]]),
        )
        for event in trace.traceEvents
        if event.ph == "X"
    )


def steps_of(bars: Sequence[Bar]) -> list[Step]:
    """Return the executor's steps that are directly followed by another one, in order."""
    begins = [(bar.number, bar.end_ns) for bar in bars if bar.role == "executor" and bar.name == "wait"]
    return [
        Step(number, begin, following)
        for (number, begin), (successor, following) in itertools.pairwise(begins)
        if successor == number + 1
    ]


def account(bars: Sequence[Bar], steps: Sequence[Step]) -> StepAccount:
    """Analyze ``steps``. A span belongs to the step in which it starts. Raises `ConfigError`."""
    if not steps:
        raise ConfigError(
            "the trace contains no two consecutive steps: send requests to the server before it stops"
        )
    computing = _overlap_with([b for b in bars if b.role == "executor" and b.name in COMPUTE])
    begins = [step.begin_ns for step in steps]
    spent: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0] * len(steps))
    hidden: dict[tuple[str, str], int] = defaultdict(int)
    for bar in bars:
        at = bisect_right(begins, bar.begin_ns) - 1
        if at < 0 or bar.begin_ns >= steps[at].end_ns:
            continue
        key = bar.role, bar.name
        spent[key][at] += bar.end_ns - bar.begin_ns
        hidden[key] += computing(bar)
    step_ns = median(step.end_ns - step.begin_ns for step in steps)
    order = list(SPANS)
    rows = [
        Row(role, name, median(each) / 1e6, median(each) / step_ns, hidden[role, name] / max(1, sum(each)))
        for (role, name), each in sorted(
            spent.items(), key=lambda item: (item[0][0], order.index(item[0][1]))
        )
    ]
    begin_ns, end_ns = steps[0].begin_ns, steps[-1].end_ns
    return StepAccount(
        len(steps), step_ns / 1e6, rows, _parts(bars, begin_ns, end_ns), (end_ns - begin_ns) / 1e9
    )


def _parts(bars: Sequence[Bar], begin_ns: int, end_ns: int) -> list[ProcessPart]:
    """Return the utilization of an executor's processes; empty for a single process."""
    parts = sorted({bar.process for bar in bars if bar.role == "executor" or " " in bar.process})
    if len(parts) == sum(" " not in process for process in parts):
        return []

    def share(process: str, names: Sequence[str]) -> float:
        spent = sum(
            max(0, min(bar.end_ns, end_ns) - max(bar.begin_ns, begin_ns))
            for bar in bars
            if bar.process == process and bar.name in names
        )
        return spent / (end_ns - begin_ns)

    return [ProcessPart(process, share(process, COMPUTE), share(process, WAITING)) for process in parts]


def _overlap_with(busy: Sequence[Bar]) -> Callable[[Bar], int]:
    """Return a function that computes the overlap in ns of a bar with ``busy`` (sorted, disjoint)."""
    ends = [bar.end_ns for bar in busy]

    def overlap(bar: Bar) -> int:
        total = 0
        for index in range(bisect_right(ends, bar.begin_ns), len(busy)):
            if busy[index].begin_ns >= bar.end_ns:
                break
            total += min(bar.end_ns, busy[index].end_ns) - max(bar.begin_ns, busy[index].begin_ns)
        return total

    return overlap
