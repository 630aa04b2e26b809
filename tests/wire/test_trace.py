"""Tracer: spans of a process and its trace file."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from quintet.process.trace import SPANS, WRITE_NOW, Tracer, merge, read_trace
from quintet.wire.ids import Role, WorkerId
from tests.processes.server import wait_until

ME = WorkerId(Role.CORE, 0, 2)
ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("process", "core", "executor", "tokenizer_proc", "detokenizer_proc", "frontend")


def test_span_starts_at_the_end_of_the_previous_one_for_the_same_step(tmp_path: Path) -> None:
    tracer = Tracer(ME, tmp_path)
    tracer.span("plan", 7, 1_000, 3_000)
    tracer.span("send", None, None, 4_000)
    assert tracer.spans() == [("plan", 7, 1_000, 3_000), ("send", 7, 3_000, 4_000)]


def test_ring_buffer_keeps_the_newest_in_order(tmp_path: Path) -> None:
    tracer = Tracer(ME, tmp_path, capacity=4)
    for step in range(7):
        tracer.span("plan", step, step, step + 1)
    assert [number for _, number, _, _ in tracer.spans()] == [3, 4, 5, 6]


def test_threads_lose_no_spans(tmp_path: Path) -> None:
    tracer = Tracer(ME, tmp_path)

    def record(base: int) -> None:
        for number in range(base, base + 2_000):
            tracer.span("encode", number, number, number + 1)

    threads = [threading.Thread(target=record, args=(base,)) for base in (0, 10_000, 20_000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    numbers = sorted(number for _, number, _, _ in tracer.spans())
    assert numbers == [base + i for base in (0, 10_000, 20_000) for i in range(2_000)]


def test_file_is_in_trace_event_format(tmp_path: Path) -> None:
    tracer = Tracer(ME, tmp_path / "made" / "here")
    tracer.span("commit", 3, 5_000_000, 5_002_500)
    path = tracer.write()
    assert path.name == "core-0.2.trace.json"
    merged = merge([read_trace(path), read_trace(path)])
    assert [event.name for event in merged.traceEvents] == [
        "process_name", "process_sort_index", "commit",
    ] * 2  # fmt: skip
    name, _, commit = merged.traceEvents[:3]
    assert name.args == {"name": "core-0"}
    assert (commit.ph, commit.ts, commit.dur, commit.args) == ("X", 5_000.0, 2.5, {"step": 3})


def test_processes_of_one_slot_have_separate_files_and_names(tmp_path: Path) -> None:
    first, second = (Tracer(ME, tmp_path, part=part) for part in ("", "stage 1"))
    assert [each.write().name for each in (first, second)] == [
        "core-0.2.trace.json", "core-0.2.stage-1.trace.json",
    ]  # fmt: skip
    assert read_trace(second.write()).traceEvents[0].args == {"name": "core-0 stage 1"}


WAITS_OUTSIDE_OF_PYTHON = """
import ctypes, sys
from quintet.process.trace import Tracer
from quintet.wire.ids import Role, WorkerId

tracer = Tracer(WorkerId(Role.CORE, 0, 2), sys.argv[1])
tracer.write_in_thread()
tracer.span("plan", 7)
print("there", flush=True)
ctypes.CDLL(None).sigsuspend(ctypes.create_string_buffer(b"\\xff" * 128))  # any signal
"""


def test_process_waiting_in_c_writes_on_signal_and_at_exit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WAITS_OUTSIDE_OF_PYTHON, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(WRITE_NOW)
        path = tmp_path / "core-0.2.trace.json"
        wait_until(path.exists, "the file")
        path.unlink()
        process.terminate()
        assert process.wait(10) == 0
    assert [event.name for event in read_trace(path).traceEvents][-1] == "plan"


STARTS_ANOTHER = """
import subprocess, sys
from quintet.process.trace import Tracer
from quintet.wire.ids import Role, WorkerId

Tracer(WorkerId(Role.CORE, 0, 2), sys.argv[1]).write_in_thread()
subprocess.run(["grep", "SigBlk", "/proc/self/status"], check=True)
"""


def test_children_of_a_traced_process_have_no_blocked_signals(tmp_path: Path) -> None:
    status = subprocess.check_output([sys.executable, "-c", STARTS_ANOTHER, str(tmp_path)], text=True)
    assert int(status.split()[1], 16) == 0


def test_an_unknown_span_is_not_recorded_under_another_name(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        Tracer(ME, tmp_path).span("plann", 1)


def test_processes_record_exactly_the_spans_of_the_table() -> None:
    sources = [path.read_text() for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    used = {name for source in sources for name in re.findall(r'\bspan\(\s*"(\w+)"', source)}
    used |= {name for source in sources for name in re.findall(r'\b_span\(\s*"(\w+)"', source)}
    assert used == set(SPANS)


def test_failed_trace_file_is_logged_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "traces"
    folder.write_text("no folder")
    with caplog.at_level("WARNING", "quintet"):
        Tracer(ME, folder).try_to_write()
    assert "cannot write the trace of this process" in caplog.text
