"""GPU session stages without a GPU: deadlines, failures, fallbacks, archive and summary."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from bench.gpu import diagnosis, stages
from bench.gpu.figures import Figure
from bench.gpu.results_file import Entry, Outcome, ResultsFile
from bench.gpu.stages import Group, Job, Session, run_stage
from bench.gpu.summary import MAX_CHARS, JobResult, summarise

PASS, FAIL, HANG = "print('fine')", "print('broken'); raise SystemExit(3)", "import time; time.sleep(1000)"


def job(name: str, code: str, fallback: str = "") -> Job:
    return Job(name, ("-c", code), ("-c", fallback) if fallback else ())


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Session:
    """Stage with 20 seconds left and logs in the test's folder."""
    monkeypatch.setattr(Session, "logs", tmp_path / "logs")
    (tmp_path / "logs").mkdir()
    return Session("cpu", "abc", tmp_path / "out", time.monotonic() + stages.RESERVE_S + 20)


def test_row_beyond_the_stage_is_recorded_and_ended(session: Session, tmp_path: Path) -> None:
    """The checklist runs a row in a separate session; the stage's limit must not orphan it."""
    pid_file = tmp_path / "pid"
    hang = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(1000)"
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {hang!r}], start_new_session=True)
time.sleep(1000)
"""
    session.deadline = time.monotonic() + stages.RESERVE_S + 8
    run_stage((Group((job("hangs", code),), 1, 1),), session)
    assert statuses(session) == {"hangs": None}
    assert ends(int(pid_file.read_text()))


def ends(pid: int) -> bool:
    """Wait for a killed process, since signals are delivered asynchronously."""
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def statuses(session: Session) -> dict[str, int | None]:
    return {result.name: result.status for result in session.results}


def test_failed_job_is_followed_by_a_diagnosis(session: Session) -> None:
    groups = (
        Group((job("a", FAIL), job("b", PASS)), 1, 1),
        Group((job("c", PASS),), 1, 1),
        Group((job("diagnosis", PASS),), 1, 1, only_after_failure=True),
    )
    run_stage(groups, session)
    assert statuses(session) == {"a": 3, "b": 0, "c": 0, "diagnosis": 0}
    with tarfile.open(session.out / "logs.tar.gz") as archive:
        assert {"a.log", "b.log", "c.log", "diagnosis.log"} <= set(archive.getnames())
    assert "a: FAILED (3)" in (session.out / "summary.txt").read_text()


def test_no_diagnosis_without_a_failure(session: Session) -> None:
    run_stage((Group((job("a", PASS),), 1, 1), Group((job("diagnosis", PASS),), 1, 1, True)), session)
    assert statuses(session) == {"a": 0}


def test_hanging_job_leaves_time_for_later_groups(session: Session) -> None:
    run_stage((Group((job("hangs", HANG),), 1, 1), Group((job("later", PASS),), 13, 13)), session)
    assert statuses(session) == {"hangs": None, "later": 0}


def test_a_job_that_fails_runs_its_fallback(session: Session) -> None:
    run_stage((Group((job("boot", FAIL, PASS),), 1, 1),), session)
    [result] = session.results
    assert result.status == 0 and result.used_fallback
    assert (session.logs / "boot-fallback.log").read_text() == "fine\n"


def test_hanging_job_with_a_fallback_leaves_time_for_it(session: Session) -> None:
    run_stage((Group((job("boot", HANG, PASS),), 1, 1),), session)
    [result] = session.results
    assert result.status == 0 and result.used_fallback


def test_a_stage_that_is_ended_kills_its_jobs(session: Session) -> None:
    program = "import os, signal, time; os.kill(os.getppid(), signal.SIGTERM); time.sleep(1000)"
    previous = signal.signal(signal.SIGTERM, stages.exit_on_signal)
    begun = time.monotonic()
    try:
        with pytest.raises(SystemExit):
            run_stage((Group((job("a", program), job("b", PASS)), 1, 1),), session)
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert time.monotonic() - begun < session.left_s(), "ended before the limit of its job"


def test_one_core_dump_is_packed(session: Session) -> None:
    for name in ("core.1.cudacore", "core.2.cudacore"):
        (session.logs / name).write_bytes(b"x")
    (session.out / "trace.json.gz").parent.mkdir(parents=True, exist_ok=True)
    with (session.out / "trace.json.gz").open("wb") as file:
        file.truncate(stages.MAX_FILE_BYTES + 1)
    stages.pack(session)
    with tarfile.open(session.out / "logs.tar.gz") as archive:
        assert archive.getnames() == ["core.1.cudacore"]
    assert not (session.out / "trace.json.gz").exists()


def test_kernels_of_other_sources_are_refused(tmp_path: Path) -> None:
    """In a folder with the scripts, a source file, and what `prepare.sh` would have made of another one."""
    scripts = tmp_path / "bench" / "gpu"
    scripts.mkdir(parents=True)
    for name in ("remote.sh", "sources.sh"):
        shutil.copy(stages.ROOT / "bench" / "gpu" / name, scripts)
    (tmp_path / "csrc").mkdir()
    (tmp_path / "csrc" / "norm.cu").write_text("changed")
    (tmp_path / "setup.py").write_text("")
    built = tmp_path / "build" / "gpu"
    built.mkdir(parents=True)
    (built / "commit").write_text("abc")
    (built / "sources").write_text("0123456789abcdef\n")
    command = ["bash", str(scripts / "remote.sh"), "a", "20", "abc", "cpu"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (
        2,
        "build/gpu was built from other kernel sources: run bench/gpu/prepare.sh again\n",
    )


def test_group_without_time_is_not_started(session: Session) -> None:
    session.deadline = time.monotonic() + stages.RESERVE_S + 1
    run_stage((Group((job("late", PASS),), 1, 1),), session)
    assert statuses(session) == {"late": None}


def test_stages_fit_their_limits_and_name_existing_files() -> None:
    for name, limit_s in (("a", 330), ("b", 400)):
        groups = stages.STAGES[name]
        assert sum(group.seconds for group in groups) + 2 * stages.RESERVE_S <= limit_s
        for each in (job for group in groups for job in group.jobs):
            module = each.command[1] if each.command[0] == "-m" else each.command[0]
            path = module if module.endswith(".py") else module.replace(".", "/") + ".py"
            assert (stages.ROOT / path).is_file(), path


def test_summary_names_failures_and_is_truncated(tmp_path: Path) -> None:
    failed = Entry(
        *(Outcome.FAILED, 2.0, "", "abc", {}),
        figures=[Figure("speed", 1.0, "GB/s")],
        remarks=["tests/gpu/test_steps.py::test_a[1]: call failed: E   assert 1 == 2"],
        tail=["x" * 300] * 40,
    )
    ResultsFile(tmp_path / "rows-steps.json").put("steps", failed, {"gpu": "none"})
    text = summarise(tmp_path, [JobResult("rows-steps", 1, 2.0, False)] * 200)
    assert "rows-steps: FAILED (1), 2 s" in text and len(text) <= MAX_CHARS
    text = summarise(tmp_path, [JobResult("rows-steps", 1, 2.0, False)])
    assert "row steps: failed, 2 s" in text and "assert 1 == 2" in text and "speed" in text


@pytest.mark.parametrize(
    ("test", "arguments"),
    [
        ("tests/gpu/test_steps.py::test_a[1]", ["tests/gpu/test_steps.py", "--only-id"]),
        ("tests/cuda/kernels/test_norm.py::test_b[2]", ["tests/gpu/test_kernels.py", "--only-id"]),
    ],
)
def test_first_failing_test_is_rerun(tmp_path: Path, test: str, arguments: list[str]) -> None:
    failed = Entry(Outcome.FAILED, 2.0, "", "abc", {}, remarks=[f"{test}: call failed: E   assert 1 == 2"])
    ResultsFile(tmp_path / "rows-x.json").put("x", failed, {})
    assert diagnosis.first_failing_test(tmp_path) == test
    assert diagnosis.pytest_arguments(test)[-3:] == [*arguments, test]


def test_test_with_a_dead_process_is_rerun(tmp_path: Path) -> None:
    ResultsFile(tmp_path / "rows-x.json").put("x", Entry(Outcome.TIMED_OUT, 2.0, "", "abc", {}), {})
    (tmp_path / "rows-x").mkdir()
    (tmp_path / "rows-x" / "x.current").write_text("tests/gpu/test_steps.py::test_a[1]")
    assert diagnosis.first_failing_test(tmp_path) == "tests/gpu/test_steps.py::test_a[1]"


def test_results_have_rows_jobs_and_figures(session: Session) -> None:
    entry = Entry(Outcome.PASSED, 2.0, "", "abc", {})
    ResultsFile(session.logs / "rows-steps.json").put("steps", entry, {"gpu": "H100"})
    (session.logs / "smoke.figures").write_text(json.dumps({"remark": "begun"}) + "\n")
    session.results.append(JobResult("smoke", 0, 1.0, False))
    stages.pack(session)
    found = json.loads((session.out / "results.json").read_text())
    assert found["device"] == {"gpu": "H100"} and found["rows"]["steps"]["outcome"] == "passed"
    assert found["jobs"][0]["name"] == "smoke" and found["figures"]["smoke"]["remarks"] == ["begun"]
