"""Run a stage of the GPU session: groups of jobs with time limits under one deadline.

    bash bench/gpu/remote.sh a 330 COMMIT      # installs wheels and starts this module
    python -m bench.gpu.stages a --seconds 330 --out DIR [--commit WORD] [--device cpu]

Jobs of a group run in parallel. A group may use all time that later groups do not need. A failed job does not end the stage.
After each group, ``logs.tar.gz``, ``results.json`` and ``summary.txt`` in ``DIR`` are replaced, so that an interrupted stage
leaves its results. The summary is printed at the end.
"""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from bench.arguments import command_parser
from bench.gpu.check import exit_on_signal
from bench.gpu.child_process import run
from bench.gpu.machine import ROOT, environment
from bench.gpu.summary import JobResult, summarise, write_results

RESERVE_S = 15.0
"""Time reserved for the archive and the summary."""
MIN_JOB_S = 5.0
"""Minimum remaining time to begin a job."""
ROW_END_S = 6.0
"""Time between the end of a checklist row and the job's limit, to record the row's results."""
MAX_PLANNED_RATIO = 1.6
"""Maximum ratio of a group's duration to its planned duration, on a GPU."""
FIRST_SHARE = 0.6
"""Share of a job's time limit for its command; its fallback gets the rest."""
MAX_CORE_BYTES = 8 << 20
"""Maximum size of a core dump in the archive."""
CORE_SUFFIX = ".cudacore"
MAX_FILE_BYTES = 16 << 20
"""Maximum size of an output file."""
SMALL_LOG_BYTES = 2 << 20
"""Maximum size of a log in the archive; a longer log is cut in the middle."""


@dataclass(frozen=True, slots=True)
class Job:
    """A process of a stage."""

    name: str
    command: tuple[str, ...]
    """Arguments of the interpreter; ``{logs}`` and ``{out}`` are replaced by the folders."""
    fallback: tuple[str, ...] = ()
    """Command that runs after a failure, if there is time."""


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that run in parallel."""

    jobs: tuple[Job, ...]
    seconds: float
    """Planned duration on a GPU."""
    toy_seconds: float
    """Planned duration with toy shapes on two cores."""
    only_after_failure: bool = False


def _rows(*names: str) -> Job:
    """Return a job that runs rows of the checklist."""
    label = f"rows-{names[0]}"
    return Job(
        label,
        (
            *("bench/gpu/check.py", "--only", *names, "--again", "--commit", "{commit}"),
            *("--results", f"{{logs}}/{label}.json", "--logs", f"{{logs}}/{label}"),
            *("--seconds", "{seconds}"),
        ),
    )


def _module(name: str, module: str, *arguments: str, fallback: tuple[str, ...] = ()) -> Job:
    def command(label: str, *extra: str) -> tuple[str, ...]:
        return ("-m", module, "--figures", f"{{logs}}/{label}.figures", *arguments, *extra)

    return Job(name, command(name), command(f"{name}-fallback", *fallback) if fallback else ())


STAGES: dict[str, tuple[Group, ...]] = {
    "a": (
        Group((_module("smoke", "bench.gpu.smoke"),), 25, 25),
        Group(
            (
                _rows("kernels"),
                _rows("codes", "kinds"),
                _rows("models-fp32", "models-bf16"),
                _rows("steps", "invariance"),
            ),
            110,
            190,
        ),
        Group(
            (
                _module(
                    "profile",
                    *("bench.gpu.step_profile", "--trace", "{out}/trace.json.gz"),
                    fallback=("--batch-invariant",),
                ),
            ),
            85,
            25,
        ),
        Group((Job("diagnosis", ("-m", "bench.gpu.diagnosis", "{logs}")),), 50, 5, only_after_failure=True),
    ),
    "b": (
        Group((_module("steps", "bench.gpu.steps"),), 75, 25),
        Group((_module("kernel-rates", "bench.gpu.kernels", "--only", "attention", "linear"),), 45, 20),
        Group((_rows("processes"), _rows("memory")), 55, 60),
        Group((_rows("kill"),), 40, 45),
        Group((_module("http", "bench.gpu.serving", "--requests", "300"),), 115, 60),
        Group((_module("graphs-off", "bench.gpu.modes", "--mode", "graphs off"),), 20, 20),
    ),
}


@dataclass(slots=True)
class Session:
    """Folders, deadline and results of a stage."""

    device: str
    commit: str
    out: Path
    deadline: float
    results: list[JobResult] = field(default_factory=list)
    is_ending: threading.Event = field(default_factory=threading.Event)
    """Set on SIGTERM: running jobs are killed, and no job begins."""

    @property
    def logs(self) -> Path:
        """Folder of job outputs, figures and core dumps; ``out`` gets its archive."""
        return ROOT / "build" / "gpu-logs"

    @property
    def has_failures(self) -> bool:
        """True if a job failed or ran out of time."""
        return any(result.status != 0 for result in self.results)

    def left_s(self) -> float:
        """Seconds until the deadline, without the reserve."""
        return self.deadline - time.monotonic() - RESERVE_S


def job_environment(logs: Path, num_parallel: int, dumps_core: bool) -> dict[str, str]:
    """Return the environment of a job: stacks of crashes, threads for its share of the cores, core dumps of kernels.

    dumps_core: enable core dumps of kernels, without memory contents and without abort of the process.
    """
    found = environment() | {
        "PYTHONFAULTHANDLER": "1",
        "TORCH_SHOW_CPP_STACKTRACES": "1",
        "TORCH_DISABLE_ADDR2LINE": "1",  # looking up source lines takes a minute for each exception
    }
    if num_parallel > 1:
        found["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // num_parallel))
    if not dumps_core:
        return found
    return found | {
        "CUDA_ENABLE_COREDUMP_ON_EXCEPTION": "1",
        "CUDA_COREDUMP_GENERATION_FLAGS": "skip_global_memory,skip_shared_memory,skip_local_memory,skip_abort",
        "CUDA_COREDUMP_FILE": str(logs / "core.%p.cudacore"),
        "CUDA_COREDUMP_SHOW_PROGRESS": "0",
    }


def run_job(job: Job, session: Session, limit_s: float, num_parallel: int) -> JobResult:
    """Run a job, and its fallback if it failed. A killed process that does not exit counts as out of time."""
    begin_s = time.monotonic()
    log = session.logs / f"{job.name}.log"
    names = {
        "logs": str(session.logs),
        "out": str(session.out),
        "commit": session.commit,
        "seconds": f"{max(MIN_JOB_S, limit_s - ROW_END_S):.0f}",
    }
    variables = job_environment(
        session.logs, num_parallel, job.name == "smoke" or job.name.startswith("rows-")
    )

    def raise_if_ending() -> None:
        if session.is_ending.is_set():
            raise RuntimeError("the stage was ended")

    def attempt(command: tuple[str, ...], target: Path, share: float = 1.0) -> int | None:
        words = [part.format(**names) for part in command]
        if words[-1] != str(session.logs):
            words += ["--device", session.device]
        remaining = share * (limit_s - (time.monotonic() - begin_s))
        try:
            return run([sys.executable, *words], ROOT, variables, target, remaining, raise_if_ending).status
        except RuntimeError as error:
            print(f"  {job.name}: {error}", flush=True)
            return None

    status = attempt(job.command, log, FIRST_SHARE if job.fallback else 1.0)
    has_time = limit_s - (time.monotonic() - begin_s) > MIN_JOB_S and not session.is_ending.is_set()
    used_fallback = bool(status != 0 and job.fallback and has_time)
    if used_fallback:
        status = attempt(job.fallback, session.logs / f"{job.name}-fallback.log")
    return JobResult(job.name, status, time.monotonic() - begin_s, used_fallback)


def run_group(group: Group, session: Session, kept_s: float) -> None:
    """Run the jobs of a group in parallel; ``kept_s`` of the remaining time is reserved for later groups."""
    limit_s = session.left_s() - kept_s
    if session.device == "cuda":  # limits the time of a hanging job
        limit_s = min(limit_s, MAX_PLANNED_RATIO * group.seconds)
    names = ", ".join(job.name for job in group.jobs)
    if limit_s < MIN_JOB_S:
        print(f"{names}: not run, {limit_s:.0f} s remain", flush=True)
        session.results += [JobResult(job.name, None, 0.0, False) for job in group.jobs]
        return
    print(f"{names}: at most {limit_s:.0f} s", flush=True)
    with ThreadPoolExecutor(len(group.jobs)) as threads:
        try:
            done = list(threads.map(lambda job: run_job(job, session, limit_s, len(group.jobs)), group.jobs))
        except BaseException:
            session.is_ending.set()
            raise
    session.results += done
    for result in done:
        print(f"  {result.text()}", flush=True)


def run_stage(groups: Sequence[Group], session: Session) -> None:
    """Run the groups in order; pack logs and results after each."""
    is_toy = session.device == "cpu"
    for index, group in enumerate(groups):
        if group.only_after_failure and not session.has_failures:
            continue
        later = [each for each in groups[index + 1 :] if session.has_failures or not each.only_after_failure]
        run_group(group, session, sum(each.toy_seconds if is_toy else each.seconds for each in later))
        pack(session)


def pack(session: Session) -> None:
    """Write the archive of logs, the results and the summary to ``out``; long logs are cut in the middle."""
    session.out.mkdir(parents=True, exist_ok=True)
    target = session.out / "logs.tar.gz"
    part = target.with_suffix(".part")
    files = [path for path in sorted(session.logs.rglob("*")) if path.is_file()]
    cores = [path for path in files if path.suffix == CORE_SUFFIX and path.stat().st_size <= MAX_CORE_BYTES]
    for kept in (cores[:1], []):
        with tarfile.open(part, "w:gz") as archive:
            for path in (*(path for path in files if path.suffix != CORE_SUFFIX), *kept):
                pack_file(archive, path, str(path.relative_to(session.logs)))
        if part.stat().st_size <= MAX_FILE_BYTES:
            break
    part.replace(target)
    for path in session.out.iterdir():
        if path.stat().st_size > MAX_FILE_BYTES:
            print(f"{path.name} is too large and was deleted: {path.stat().st_size} bytes", flush=True)
            path.unlink()
    write_results(session.logs, session.results, session.out / "results.json")
    (session.out / "summary.txt").write_text(summarise(session.logs, session.results))


def pack_file(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a file to the archive; a long log is cut in the middle."""
    content = path.read_bytes()
    if len(content) > SMALL_LOG_BYTES and path.suffix != CORE_SUFFIX:
        half = SMALL_LOG_BYTES // 2
        content = content[:half] + b"\n... cut ...\n" + content[-half:]
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def write_machine_facts(target: Path) -> None:
    """Write a description of the machine and its packages."""
    commands = (
        ["nvidia-smi", "-q"],
        ["nvidia-smi", "topo", "-m"],
        [sys.executable, "-m", "pip", "list", "--format=freeze"],
        ["bash", "-c", "ulimit -a; nproc; free -g; df -h . /tmp; uname -a"],
    )
    with target.open("w") as file:
        for command in commands:
            file.write(f"$ {' '.join(command)}\n")
            file.flush()
            try:
                subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, timeout=5, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                file.write(f"{error}\n")


def main() -> int:
    """Parse the command line and run a stage; return 1 if a job failed."""
    signal.signal(signal.SIGTERM, exit_on_signal)
    parser = command_parser(__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--seconds", type=float, required=True, help="time limit of the stage")
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--commit", default="unknown", help="commit in the results")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with toy shapes"
    )
    parser.add_argument("--elapsed", type=float, default=0.0, help="seconds of the time limit already used")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds - arguments.elapsed
    session = Session(arguments.device, arguments.commit, arguments.out.resolve(), deadline)
    shutil.rmtree(session.logs, ignore_errors=True)
    session.logs.mkdir(parents=True)
    write_machine_facts(session.logs / "facts.txt")
    os.chdir(ROOT)
    try:
        run_stage(STAGES[arguments.stage], session)
    finally:
        pack(session)
    print((session.out / "summary.txt").read_text(), flush=True)
    return int(session.has_failures)


if __name__ == "__main__":
    sys.exit(main())
