"""GPU checklist without a GPU: outcomes of rows (passed, missed, crashed, hung, skipped), and the rows on small
shapes.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from bench.gpu import check
from bench.gpu.child_process import members, run
from bench.gpu.engine import drive
from bench.gpu.figures import Figure, Report, read_lines
from bench.gpu.in_process import run_in_process
from bench.gpu.kernels import SUITES
from bench.gpu.machine import ROOT, environment
from bench.gpu.results_file import Outcome, ResultsFile, file_name
from bench.gpu.rows import ROWS, Row, rows_of
from bench.gpu.shapes import LLAMA_3_8B
from bench.gpu.smoke import LoggedDevice
from bench.gpu.steps import check_is_device_worker
from bench.gpu.synthetic_plans import Batch, KvMemoryTooSmall, Plans
from bench.gpu.workload import DISTRIBUTIONS, Work, requests

from quintet.executor.backends.cuda.device import Device, Kernel
from quintet.executor.interface import StepWorker
from quintet.wire.codec import unpack_i32
from quintet.wire.step import StepPlan, StepResult

REPORT = """
import subprocess
import sys
import time
from pathlib import Path
from bench.gpu.figures import Figure, Report
report = Report(Path(sys.argv[sys.argv.index("--figures") + 1]))
report.figure(Figure("speed", {value}, "GB/s", at_least=10.0))
"""


def row_of(code: str, name: str = "row", limit_s: int = 30, needs: tuple[str, ...] = ()) -> Row:
    return Row(name, "something", "something", ("-c", code), needs, takes_s=1, limit_s=limit_s)


@pytest.fixture
def check_run(tmp_path: Path) -> check.CheckRun:
    return check.CheckRun("cuda", tmp_path / "logs", {"gpu": "none"}, {"python": "3"}, "abc")


@pytest.fixture
def results(tmp_path: Path) -> ResultsFile:
    return ResultsFile(tmp_path / "results.json")


def test_a_row_passes_when_its_targets_are_met(results: ResultsFile, check_run: check.CheckRun) -> None:
    rows = [row_of(REPORT.format(value=12.5), "fast"), row_of(REPORT.format(value=7), "slow")]
    check.run_rows(rows, results, check_run, again=False, budget_s=60)
    assert results.entries["fast"].outcome is Outcome.PASSED
    assert results.entries["slow"].outcome is Outcome.MISSED
    assert results.entries["slow"].figures == [Figure("speed", 7.0, "GB/s", at_least=10.0)]
    assert ResultsFile(results.path).entries == results.entries


def test_crashed_row_keeps_its_figures_and_others_run(
    results: ResultsFile, check_run: check.CheckRun
) -> None:
    crashing = row_of(REPORT.format(value=12.5) + "import os; os.abort()", "crashing")
    check.run_rows([crashing, row_of("pass", "next")], results, check_run, again=False, budget_s=60)
    crashed = results.entries["crashing"]
    assert crashed.outcome is Outcome.FAILED
    assert [figure.value for figure in crashed.figures] == [12.5]
    assert any("Aborted" in line for line in crashed.tail)
    assert results.entries["next"].outcome is Outcome.PASSED


def test_hanging_row_is_killed_with_its_processes(
    results: ResultsFile, check_run: check.CheckRun, tmp_path: Path
) -> None:
    """Includes processes in another process group, like those of a server."""
    pid_file = tmp_path / "pid"
    code = f"""
import subprocess, sys, threading
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], process_group=0)
Path({str(pid_file)!r}).write_text(str(child.pid))
threading.Event().wait()
"""
    check.run_rows([row_of(code, limit_s=4)], results, check_run, again=False, budget_s=60)
    entry = results.entries["row"]
    assert entry.outcome is Outcome.TIMED_OUT
    assert any("most recent call first" in line for line in entry.tail)  # hanging line
    assert not is_alive(int(pid_file.read_text()))


def test_sigterm_ends_the_checklist_and_every_process_of_its_row(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    row = f"""
import signal, subprocess
from pathlib import Path
child = subprocess.Popen(["sleep", "1000"], process_group=0)
Path({str(pid_file)!r}).write_text(str(child.pid))
signal.pause()
"""
    program = f"""
import signal, sys
from pathlib import Path
sys.path.insert(0, {str(check.ROOT)!r})
from bench.gpu import check
from bench.gpu.child_process import run
signal.signal(signal.SIGTERM, check.exit_on_signal)
run([sys.executable, "-c", {row!r}], Path("."), {{}}, Path({str(tmp_path / "log")!r}), 600)
"""
    checklist = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env=environment())
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "")
    checklist.terminate()
    assert checklist.wait(30) == 128 + signal.SIGTERM
    assert not is_alive(int(pid_file.read_text()))


def wait_until(condition: Callable[[], bool], limit_s: float = 30.0) -> None:
    """Wait for another process."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not true after {limit_s:g} s"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        stat = (Path("/proc") / str(pid) / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_processes_left_by_a_row_are_ended(tmp_path: Path) -> None:
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000'], process_group=0).pid)"
    log = tmp_path / "log"
    ended = run([sys.executable, "-c", code], tmp_path, environment(), log, 30)
    assert ended.status == 0
    left = int(log.read_text())
    try:
        assert not is_alive(left)
    finally:
        with suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    assert os.getpid() in members(os.getsid(0))


def test_second_call_continues_after_the_first(
    results: ResultsFile, check_run: check.CheckRun, tmp_path: Path
) -> None:
    def counting(name: str) -> Row:
        return row_of(f"open({str(tmp_path / name)!r}, 'a').write('x')", name)

    def counts() -> list[int]:
        return [len((tmp_path / name).read_text()) for name in ("a", "b")]

    check.run_rows([counting("a")], results, check_run, again=False, budget_s=60)
    check.run_rows(
        [counting("a"), counting("b")], ResultsFile(results.path), check_run, again=False, budget_s=60
    )
    assert counts() == [1, 1]
    check.run_rows(
        [counting("a"), counting("b")], ResultsFile(results.path), check_run, again=True, budget_s=60
    )
    assert counts() == [2, 2]


def test_row_with_a_missing_package_is_skipped_until_installed(
    results: ResultsFile, check_run: check.CheckRun, capsys: pytest.CaptureFixture[str]
) -> None:
    check.run_rows([row_of("pass", needs=("no_such_module",))], results, check_run, again=False, budget_s=60)
    assert results.entries["row"].outcome is Outcome.SKIPPED
    assert "missing packages: no_such_module" in capsys.readouterr().out
    check.run_rows([row_of("pass")], results, check_run, again=False, budget_s=60)
    assert results.entries["row"].outcome is Outcome.PASSED
    check.run_rows([row_of("pass", needs=("no_such_module",))], results, check_run, again=True, budget_s=60)
    assert results.entries["row"].outcome is Outcome.PASSED


def test_row_of_several_gpus_is_skipped_with_fewer(
    results: ResultsFile, check_run: check.CheckRun, capsys: pytest.CaptureFixture[str]
) -> None:
    row = dataclasses.replace(row_of("pass"), gpus=2)
    check.run_rows([row], results, check_run, again=False, budget_s=60)
    assert results.entries["row"].outcome is Outcome.SKIPPED
    assert "needs 2 GPUs, found 1" in capsys.readouterr().out
    two = dataclasses.replace(check_run, facts={"gpus": 2})
    check.run_rows([row], results, two, again=False, budget_s=60)
    assert results.entries["row"].outcome is Outcome.PASSED


def test_budget_starts_no_longer_row_and_records_no_aborted_one(
    results: ResultsFile, check_run: check.CheckRun
) -> None:
    check.run_rows([row_of("pass")], results, check_run, again=False, budget_s=0.5)
    hanging = row_of("import signal; signal.pause()", "hanging")
    check.run_rows([hanging], results, check_run, again=False, budget_s=1.5)
    assert results.entries == {}


def test_truncated_lines_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "figures"
    report = Report(path)
    report.remark("begun")
    report.figure(Figure("a", 1.0, "s"))
    lines = path.read_text() + '{"figure": {"name": "b"'
    assert read_lines(lines.splitlines()) == ([Figure("a", 1.0, "s")], ["begun"])


@pytest.mark.parametrize(
    ("bounds", "value", "met"),
    [
        ({}, 1.0, None),
        ({"at_least": 2.0}, 2.0, True),
        ({"at_least": 2.0}, 1.9, False),
        ({"at_most": 2.0}, 2.1, False),
        ({"at_least": 1.0, "at_most": 2.0}, float("nan"), False),
    ],
)
def test_targets(bounds: dict[str, float], value: float, met: bool | None) -> None:
    assert Figure("a", value, "s", **bounds).is_met is met


def test_names() -> None:
    assert file_name("2026-11-21", "NVIDIA H200") == "gpu-2026-11-21-nvidia-h200.json"
    assert [row.name for row in rows_of(["decode", "ceilings"])] == ["ceilings", "decode"]
    with pytest.raises(ValueError, match="unknown row 'decoed'"):
        rows_of(["decoed"])


def test_every_row_has_an_existing_command_and_a_documented_line() -> None:
    docs = (ROOT / "docs" / "gpu.md").read_text()
    for row in ROWS:
        if row.command[1].startswith("bench."):
            assert importlib.util.find_spec(row.command[1]) is not None
        else:
            files = [word for word in row.command if word.startswith("tests/")]
            assert files and all((ROOT / word).is_file() for word in files)
        assert f"| `{row.name}` | {row.shows} | {row.target} |" in docs
    assert sum(row.takes_s for row in ROWS) <= 16 * 60


WITHOUT_SOCKETS = """
import importlib, sys
class Missing:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"zmq", "starlette", "uvicorn"}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
for module in sys.argv[1:]:
    importlib.import_module(module)
"""


@pytest.mark.whole  # it imports them again
def test_rows_without_a_server_need_no_sockets(tmp_path: Path) -> None:
    """A machine with only torch and CuPy can run them."""
    commands = [row.command for row in ROWS if "zmq" not in row.needs]
    modules = [command[1] for command in commands if command[1].startswith("bench.")]
    modules += [suite.partition(":")[0] for suite in SUITES.values()]
    tests = [word for command in commands for word in command if word.startswith("tests/")]
    modules += [word.removesuffix(".py").replace("/", ".") for word in tests]
    assert len(modules) > 15
    log = tmp_path / "log"
    assert (
        run([sys.executable, "-c", WITHOUT_SOCKETS, *modules], ROOT, environment(), log, 120).status == 0
    ), log.read_text()


def test_shape_is_llama_3_8b() -> None:
    """Meta states 8.03 billion parameters: both embedding tables, every linear layer, and the norms left out here."""
    shape = LLAMA_3_8B
    parameters = shape.layers * shape.layer_weights + 2 * shape.vocab_size * shape.hidden
    assert round(parameters / 1e9, 2) == 8.03
    assert shape.kv_bytes_per_token == 128 << 10


def test_rows_write_private_blocks_and_share_read_contexts() -> None:
    plans = Plans(100, num_blocks=20, block_size=16, max_model_len=256)
    batch = Batch(plans, 4, 64, num_steps=16)  # 2 blocks each to write, 4 each to read: enough for 3 contexts
    assert batch.num_contexts == 3
    tables = [unpack_i32(plan.blocks)[3::4] for plan in batch.admissions]
    assert tables[3][:4] == tables[0][:4]
    written = [block for table in tables for block in table[4:]]
    read = {block for table in tables for block in table[:4]}
    assert len(written) == len(set(written)) == 8 and not read & set(written)
    with pytest.raises(KvMemoryTooSmall):
        Batch(plans, 9, 64, num_steps=16)


@dataclass
class OneStep:
    """Step with 9 ms of device time after 1 ms of idle time."""

    worker: CountingWorker
    device_ms: float = 9.0
    gap_ms: float = 1.0

    def wait(self) -> None:
        pass

    def result(self) -> StepResult:
        self.worker.in_flight -= 1
        return StepResult(1, 0, b"")


class CountingWorker:
    """Counts the steps in flight."""

    def __init__(self) -> None:
        self.in_flight = self.most = 0

    def begin(self, plan: StepPlan) -> OneStep:
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        return OneStep(self)


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_steps_overlap(max_in_flight: int) -> None:
    worker = CountingWorker()
    batch = Batch(Plans(100, num_blocks=20, block_size=16, max_model_len=256), 1, 64, num_steps=8)
    timing = drive(worker, [batch.step() for _ in range(8)], max_in_flight)  # type: ignore[arg-type]
    assert worker.most == max_in_flight and worker.in_flight == 0
    assert len(timing.ends_s) == 8
    assert timing.gap_share(skipped=2) == pytest.approx(0.1)


def test_lengths_have_the_documented_means() -> None:
    inputs, outputs = DISTRIBUTIONS[Work.CONVERSATION, "cuda"]
    requested = requests(Work.CONVERSATION, "cuda", 4000, 1000, seed=0)
    mean_in = sum(len(one.prompt) for one in requested) / len(requested)
    mean_out = sum(one.output_len for one in requested) / len(requested)
    # The cut lowers the mean by a few percent; the mean of 4,000 samples is within 3 % (two deviations).
    assert 0.88 * inputs.mean < mean_in < 1.03 * inputs.mean
    assert 0.88 * outputs.mean < mean_out < 1.03 * outputs.mean


@pytest.mark.parametrize(
    "words",
    [("bench.gpu.ceilings",), ("bench.gpu.steps",), ("bench.gpu.kernels", "--only", "pointwise")],
    ids=" ".join,
)
def test_programs_run_on_toy_shapes(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, since torch is imported."""
    name, *options = words
    figures_file = tmp_path / "figures"
    monkeypatch.setattr(sys, "argv", [name, *options, "--device", "cpu", "--figures", str(figures_file)])
    importlib.import_module(name).main()
    figures, _ = read_lines(figures_file.read_text().splitlines())
    assert figures and all(figure.value > 0 for figure in figures)


def test_in_process_engine_finishes_its_requests() -> None:
    rates = run_in_process(Work.CONVERSATION, "cpu", 12)
    assert rates.tokens > rates.requests > 0


IMAGE = {
    *("torch", "cupy", "transformers", "tokenizers", "triton", "pytest", "numpy", "uvloop", "yaml", "psutil"),
    *("prometheus_client", "safetensors", "tqdm", "jinja2"),
}
"""Python packages of the GPU machine's image, by import name."""


def test_each_needed_package_is_installed_there_or_carried() -> None:
    prepare = (ROOT / "bench/gpu/prepare.sh").read_text()
    [names] = re.findall(r"grep -iE '\^\(([\w|]+)\)==' constraints.txt", prepare)
    carried = {{"pyzmq": "zmq"}.get(name, name) for name in names.split("|")}
    needed = {name for row in ROWS for name in row.needs}
    assert needed <= IMAGE | carried, needed - IMAGE - carried


def test_only_a_worker_of_own_kernels_is_measured() -> None:
    with pytest.raises(SystemExit, match="does not use our CUDA kernels"):
        check_is_device_worker(cast(StepWorker, SimpleNamespace(facts={"worker": "torch"})))


def test_the_smoke_test_does_not_synchronize_in_a_capture() -> None:
    log: list[str] = []
    device = SimpleNamespace(
        launch=lambda *_: log.append("launch"),
        synchronize=lambda: log.append("synchronize"),
        capture=lambda run: run(),
    )
    logged = LoggedDevice(cast(Device, device))
    kernel = Kernel("norm", "rms", "")
    logged.capture(lambda: logged.launch(kernel, (1, 1, 1), (1, 1, 1), ()))
    logged.launch(kernel, (1, 1, 1), (1, 1, 1), ())
    assert log == ["launch", "launch", "synchronize"]
