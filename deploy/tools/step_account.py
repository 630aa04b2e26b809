"""What the spans of all processes say about a step: how long each thing takes, and how much of it nobody waits for.

A step is the time from the moment the executor begins one plan to the moment it begins the next. Knows nothing of how
spans are recorded (``process/trace.py``) or drawn (``bench/timeline``).
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
"""Spans in which the executor works on a step: what everything else should hide behind."""
WAITING = ("wait", "bubble")
"""Spans in which a process of an executor has nothing to do."""


@dataclass(frozen=True, slots=True, order=True)
class Bar:
    """One span of one process. Times are on the machine's monotonic clock."""

    begin_ns: int
    end_ns: int
    process: str
    """``executor-0``; of an executor that is several processes, the others ``executor-0 stage 1``, ``executor-0 rank 3``."""
    name: str
    number: int

    @property
    def role(self) -> str:
        """The kind of process; of an executor's others which one it is."""
        slot, _, part = self.process.partition(" ")
        return part or slot.rpartition("-")[0]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the executor."""

    number: int
    begin_ns: int
    end_ns: int
    """When the next one began."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the account."""

    role: str
    name: str
    ms: float
    """Median per step, all spans of this name in the step together."""
    share: float
    """Of the median step."""
    hidden: float
    """Share of its time during which the executor works on a step, so that nobody waits for it."""


@dataclass(frozen=True, slots=True)
class ProcessPart:
    """What one process of an executor that is several did from the first of the steps to the last."""

    process: str
    computed: float
    """Share of that time."""
    waited: float
    """Likewise, for another stage, or for something to do: the bubble."""


@dataclass(frozen=True, slots=True)
class StepAccount:
    """A step in numbers."""

    num_steps: int
    step_ms: float
    rows: list[Row]
    parts: list[ProcessPart]
    """Of an executor that is one process none."""
    all_s: float
    """From the first step's beginning to the last one's end."""

    def text(self) -> str:
        """Lay it out as a table."""
        lines = [
            f"step: {self.step_ms:.3f} ms (median of {self.num_steps})",
            f"{'process':<12} {'span':<11} {'ms a step':>10} {'share':>8} {'while the executor works':>25}",
        ]
        for row in self.rows:
            beside = f"{row.hidden:.0%}" if row.role != "executor" else ""
            lines.append(f"{row.role:<12} {row.name:<11} {row.ms:>10.3f} {row.share:>8.2%} {beside:>25}")
        if self.parts:
            lines.append(f"\n{f'of {self.all_s:.3f} s':<24} {'computed':>10} {'waited':>8}")
        lines += [f"{part.process:<24} {part.computed:>10.1%} {part.waited:>8.1%}" for part in self.parts]
        return "\n".join(lines)


def read_folder(folder: Path) -> list[Trace]:
    """Read the traces that the processes of a server left in ``folder``."""
    paths = sorted(folder.glob(f"*{SUFFIX}"))
    if not paths:
        raise ConfigError(
            f"{folder} holds no *{SUFFIX} files; start the server with --trace {folder}, and stop it first: "
            "the processes write as they end"
        )
    try:
        return [read_trace(path) for path in paths]
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{folder} holds a file that is no trace of this version: {error}") from None


def bars_of(trace: Trace) -> list[Bar]:
    """Return every span of a trace, in the order of their beginnings."""
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
    """Return the executor's steps that another one followed, in order."""
    begins = [(bar.number, bar.end_ns) for bar in bars if bar.role == "executor" and bar.name == "wait"]
    return [
        Step(number, begin, following)
        for (number, begin), (successor, following) in itertools.pairwise(begins)
        if successor == number + 1
    ]


def account(bars: Sequence[Bar], steps: Sequence[Step]) -> StepAccount:
    """Take the account of ``steps``. A span belongs to the step in which it began."""
    if not steps:
        raise ConfigError("the trace holds no two steps in a row: send the server some requests first")
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
    """Return what the processes of an executor that is several did between two moments."""
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
    """Return a function that says how many nanoseconds of a bar fall into ``busy`` (sorted, disjoint)."""
    ends = [bar.end_ns for bar in busy]

    def overlap(bar: Bar) -> int:
        total = 0
        for index in range(bisect_right(ends, bar.begin_ns), len(busy)):
            if busy[index].begin_ns >= bar.end_ns:
                break
            total += min(bar.end_ns, busy[index].end_ns) - max(bar.begin_ns, busy[index].begin_ns)
        return total

    return overlap
